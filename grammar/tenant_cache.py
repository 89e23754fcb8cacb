"""`TenantCache`: an LRU cache per tenant, bounded by bytes. Sizes may change: `reweigh` counts them again.

Invariants: a lookup sees its own tenant's entries only; a tenant within its fair share (the cache divided by its
tenants) never loses an entry to another tenant.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(slots=True)
class _Tenant(Generic[Value]):
    """Entries with their counted bytes, from the least to the most recently used, and the sum of the bytes."""

    entries: "OrderedDict[Hashable, tuple[Value, int]]" = field(default_factory=OrderedDict)
    size_bytes: int = 0


class TenantCache(Generic[Value]):
    """At most `max_bytes` for all tenants and `max_tenant_bytes` for one; a larger entry is not cached.

    Not safe to use from several threads.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int, size_of: Callable[[Value], int]) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._size_of = size_of
        self._tenants: dict[bytes, _Tenant[Value]] = {}
        self.size_bytes = 0

    def get(self, namespace: bytes, key: Hashable) -> Value | None:
        """Return this tenant's value of `key`, or None."""
        tenant = self._tenants.get(namespace)
        if tenant is None or key not in tenant.entries:
            return None
        tenant.entries.move_to_end(key)
        return tenant.entries[key][0]

    def put(self, namespace: bytes, key: Hashable, value: Value) -> None:
        """Store `value` in place of an earlier one and evict older entries as needed."""
        tenant = self._tenants.setdefault(namespace, _Tenant())
        if key in tenant.entries:
            self._count(tenant, -tenant.entries.pop(key)[1])
        size = self._size_of(value)
        if size <= min(self._max_bytes, self._max_tenant_bytes):
            tenant.entries[key] = (value, size)
            self._count(tenant, size)
        elif not tenant.entries:
            del self._tenants[namespace]
        self._make_room(namespace)

    def reweigh(self, namespace: bytes, key: Hashable) -> None:
        """Count the present size of an entry that has grown, and evict as needed. Its age stays."""
        tenant = self._tenants.get(namespace)
        if tenant is None or key not in tenant.entries:
            return
        value, counted = tenant.entries[key]
        size = self._size_of(value)
        tenant.entries[key] = (value, size)
        self._count(tenant, size - counted)
        self._make_room(namespace)

    def _make_room(self, namespace: bytes) -> None:
        tenant = self._tenants.get(namespace)
        while tenant is not None and tenant.size_bytes > self._max_tenant_bytes:
            self._evict(namespace)
        while self.size_bytes > self._max_bytes:
            self._evict(max(self._tenants, key=lambda each: self._tenants[each].size_bytes))

    def _evict(self, namespace: bytes) -> None:
        """Drop the entry of one tenant that was used longest ago."""
        tenant = self._tenants[namespace]
        _, (_, size) = tenant.entries.popitem(last=False)
        self._count(tenant, -size)
        if not tenant.entries:
            del self._tenants[namespace]

    def _count(self, tenant: _Tenant[Value], change: int) -> None:
        tenant.size_bytes += change
        self.size_bytes += change
