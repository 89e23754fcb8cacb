"""`GrammarMemory`: what the compiled grammars of all tenants take, cached or in use, and which of them are to be rebuilt.

Invariant: a tenant within its share has no grammar rebuilt for what other tenants use.
"""

import ctypes
import threading
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

TRIM_BYTES = 32 << 20
"""Growth after which freed memory is returned. Without it, an engine's three arenas took twice what was in use."""


class GrowingGrammar(Protocol):
    """A compiled grammar that grows while it is used."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_quickly_built(self) -> bool: ...


class GrammarMemory:
    """Finds the largest grammars of a tenant above its share. Safe to use from several threads.

    The share is `max_tenant_bytes`, or an equal part of `max_bytes` while all tenants together use more than that.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._lock = threading.Lock()
        self._grammars: dict[bytes, WeakSet[GrowingGrammar]] = {}
        self._sizes: dict[bytes, int] = {}
        self._grown_bytes = 0

    def add(self, namespace: bytes, grammar: GrowingGrammar) -> None:
        """Count `grammar` for as long as it lives."""
        with self._lock:
            for empty in [each for each, grammars in self._grammars.items() if not grammars]:
                del self._grammars[empty], self._sizes[empty]
            self._grammars.setdefault(namespace, WeakSet()).add(grammar)
            self._count(namespace, grammar.size_bytes)

    def size_bytes(self, namespace: bytes) -> int:
        """Return the estimated bytes of a tenant's grammars."""
        with self._lock:
            return self._weigh(namespace) if namespace in self._grammars else 0

    def exceeds_share(self, namespace: bytes, grammar: GrowingGrammar, added_bytes: int) -> bool:
        """Count growth of `grammar`. Whether its tenant is above its share and it takes most of that share.

        False for one that takes long to build: its number of lexer states alone bounds it.
        """
        with self._lock:
            self._count(namespace, added_bytes)
            share = self._share_bytes()
            is_above = self._sizes[namespace] > share and self._weigh(namespace) > share
            count = len(self._grammars[namespace])
            trims = self._grown_bytes >= TRIM_BYTES
            self._grown_bytes = 0 if trims else self._grown_bytes
        if trims:
            return_free_memory()
        return is_above and grammar.size_bytes > share // count and grammar.is_quickly_built

    def _count(self, namespace: bytes, added_bytes: int) -> None:
        self._sizes[namespace] = self._sizes.get(namespace, 0) + added_bytes
        self._grown_bytes += added_bytes

    def _weigh(self, namespace: bytes) -> int:
        self._sizes[namespace] = sum(grammar.size_bytes for grammar in list(self._grammars[namespace]))
        return self._sizes[namespace]

    def _share_bytes(self) -> int:
        """Weigh all tenants only where their last known sizes, which miss what was freed since, exceed the bound."""
        if (
            sum(self._sizes.values()) > self._max_bytes
            and sum(map(self._weigh, self._grammars)) > self._max_bytes
        ):
            return min(self._max_tenant_bytes, self._max_bytes // len(self._grammars))
        return self._max_tenant_bytes


def return_free_memory() -> None:
    """Return freed memory to the kernel (glibc). Takes milliseconds; one thread's allocations wait for a part of them."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
