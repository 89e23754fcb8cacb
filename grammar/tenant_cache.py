"""`TenantCache`: an LRU cache per tenant, bounded by bytes. Sizes may change: `reweigh` counts them again.

Invariants: a lookup sees its own tenant's entries only; a tenant within its fair share (the cache divided by its
tenants) never loses an entry to another tenant.
"""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cachetools import LRUCache

Value = TypeVar("Value")


class TenantCache(Generic[Value]):
    """At most `max_bytes` for all tenants and `max_tenant_bytes` for one; a larger entry is not cached.

    Not safe to use from several threads.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = min(max_bytes, max_tenant_bytes)
        self._size_of = size_of
        self._tenants: dict[bytes, LRUCache[Hashable, Value]] = {}
        self.size_bytes = 0

    def get(self, namespace: bytes, key: Hashable) -> Value | None:
        """Return this tenant's value of `key`, or None."""
        tenant = self._tenants.get(namespace)
        return None if tenant is None else tenant.get(key)

    def put(self, namespace: bytes, key: Hashable, value: Value) -> None:
        """Store `value` in place of an earlier one and evict older entries as needed."""
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = LRUCache(self._max_tenant_bytes, self._size_of)
        before = tenant.currsize
        tenant.pop(key, None)
        if self._size_of(value) <= tenant.maxsize:
            tenant[key] = value
        self.size_bytes += int(tenant.currsize - before)
        self._drop_empty(namespace)
        while self.size_bytes > self._max_bytes:
            self._evict(max(self._tenants, key=lambda each: self._tenants[each].currsize))

    def reweigh(self, namespace: bytes, key: Hashable) -> None:
        """Count the present size of an entry that has grown, and evict as needed. It counts as used now."""
        value = self.get(namespace, key)
        if value is not None:
            self.put(namespace, key, value)

    def _evict(self, namespace: bytes) -> None:
        """Drop the entry of one tenant that was used longest ago."""
        tenant = self._tenants[namespace]
        before = tenant.currsize
        tenant.popitem()
        self.size_bytes += int(tenant.currsize - before)
        self._drop_empty(namespace)

    def _drop_empty(self, namespace: bytes) -> None:
        if not self._tenants[namespace]:
            del self._tenants[namespace]
