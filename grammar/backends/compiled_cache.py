"""What is built for tenants once: compiled grammars, composed forms. Invariant: one build per key at a time, whoever asks;
what a tenant has built is kept as `tenant_cache.py` says.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from loraplex.grammar.tenant_cache import TenantCache


class Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class CompiledCache(Generic[Value]):
    """`most_bytes` for all tenants, `most_tenant_bytes` for one. Safe to use from several threads."""

    def __init__(self, most_bytes: int, most_tenant_bytes: int) -> None:
        self._lock = threading.Lock()
        self._kept: TenantCache[Value] = TenantCache(most_bytes, most_tenant_bytes, attrgetter("size_bytes"))
        self._builds: dict[tuple[bytes, Hashable], Future[Value]] = {}

    @property
    def size_bytes(self) -> int:
        """What all tenants hold."""
        return self._kept.size_bytes

    def peek(self, namespace: bytes, key: Hashable) -> Value | None:
        """The value of `key` if it is there; never waits for a build."""
        with self._lock:
            return self._kept.get(namespace, key)

    def get(self, namespace: bytes, key: Hashable, build: Callable[[], Value]) -> Value:
        """The value of `key`, built at most once however many threads ask. What `build` raises, each of them raises."""
        with self._lock:
            known = self._kept.get(namespace, key)
            if known is not None:
                return known
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
            self._kept.put(namespace, key, value)
            del self._builds[namespace, key]
        future.set_result(value)
        return value
