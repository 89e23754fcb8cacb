"""Compiled grammars by tenant. Invariants: a key is looked up in its own tenant's entries only; a tenant within its fair
share (the cache divided by the tenants in it) never loses an entry to another; one build per key at a time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


@dataclass
class _Tenant(Generic[Value]):
    """Entries from the least to the most recently used, and their bytes."""

    entries: "OrderedDict[Hashable, Value]" = field(default_factory=OrderedDict)
    size_bytes: int = 0


class CompiledCache(Generic[Value]):
    """`most_bytes` for all tenants, `most_tenant_bytes` for one. Safe to use from several threads."""

    def __init__(self, most_bytes: int, most_tenant_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._most_tenant_bytes = most_tenant_bytes
        self._lock = threading.Lock()
        self._tenants: dict[bytes, _Tenant[Value]] = {}
        self._builds: dict[tuple[bytes, Hashable], Future[Value]] = {}
        self.size_bytes = 0

    def peek(self, namespace: bytes, key: Hashable) -> Value | None:
        """The value of `key` if it is there; never waits for a build."""
        with self._lock:
            tenant = self._tenants.get(namespace)
            if tenant is None or key not in tenant.entries:
                return None
            tenant.entries.move_to_end(key)
            return tenant.entries[key]

    def get(self, namespace: bytes, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of `key`, built at most once however many threads ask. What `build` raises, each of them raises."""
        with self._lock:
            tenant = self._tenants.get(namespace)
            if tenant is not None and key in tenant.entries:
                tenant.entries.move_to_end(key)
                return tenant.entries[key]
            running = self._builds.get((namespace, key))
            future = running or self._builds.setdefault((namespace, key), Future())
        return future.result() if running else self._build(namespace, key, build, future)

    def _build(
        self, namespace: bytes, key: Hashable, build: Callable[[], Value], future: "Future[Value]"
    ) -> Value:
        try:
            value = build()
        except BaseException as error:
            with self._lock:
                del self._builds[namespace, key]
            future.set_exception(error)
            raise
        with self._lock:
            self._keep(namespace, key, value)
            del self._builds[namespace, key]
        future.set_result(value)
        return value

    def _keep(self, namespace: bytes, key: Hashable, value: Value) -> None:
        if value.size_bytes > min(self._most_bytes, self._most_tenant_bytes):
            return
        tenant = self._tenants.setdefault(namespace, _Tenant())
        tenant.entries[key] = value
        tenant.size_bytes += value.size_bytes
        self.size_bytes += value.size_bytes
        while tenant.size_bytes > self._most_tenant_bytes:
            self._evict(namespace)
        while self.size_bytes > self._most_bytes:
            self._evict(max(self._tenants, key=lambda each: self._tenants[each].size_bytes))

    def _evict(self, namespace: bytes) -> None:
        """Drop the entry of one tenant that was used longest ago."""
        tenant = self._tenants[namespace]
        _, value = tenant.entries.popitem(last=False)
        tenant.size_bytes -= value.size_bytes
        self.size_bytes -= value.size_bytes
        if not tenant.entries:
            del self._tenants[namespace]
