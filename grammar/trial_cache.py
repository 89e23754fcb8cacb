"""Verdicts that are remembered, per tenant. Invariant: what one tenant asks for never shortens what another one's takes beyond
the common total, and is never seen by it.
"""

from collections import OrderedDict
from typing import Final

from loraplex.grammar.trial_messages import Verdict

ENTRY_BYTES: Final = 512
"""What an entry takes beside its text: key, verdict, and places in the tables."""


class VerdictCache:
    """Least recently used first, by bytes; when the total is full, the tenant that holds most gives way."""

    def __init__(self, max_bytes: int, max_bytes_per_tenant: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._tenants: dict[bytes, OrderedDict[bytes, Verdict]] = {}
        self._held: dict[bytes, int] = {}
        self._total = 0

    @property
    def total_bytes(self) -> int:
        """What all tenants hold."""
        return self._total

    def get(self, namespace: bytes, digest: bytes) -> Verdict | None:
        """The verdict on a spec this tenant has asked for before."""
        entries = self._tenants.get(namespace)
        if entries is None or digest not in entries:
            return None
        entries.move_to_end(digest)
        return entries[digest]

    def put(self, namespace: bytes, digest: bytes, verdict: Verdict) -> None:
        """Remember; older ones are forgotten as needed."""
        entries = self._tenants.setdefault(namespace, OrderedDict())
        old = entries.pop(digest, None)
        entries[digest] = verdict
        self._count(namespace, _size(verdict) - (0 if old is None else _size(old)))
        while self._held.get(namespace, 0) > self._max_bytes_per_tenant:
            self._forget_oldest(namespace)
        while self._total > self._max_bytes:
            self._forget_oldest(max(self._held, key=self._held.__getitem__))

    def _forget_oldest(self, namespace: bytes) -> None:
        _, verdict = self._tenants[namespace].popitem(last=False)
        self._count(namespace, -_size(verdict))

    def _count(self, namespace: bytes, change: int) -> None:
        self._total += change
        self._held[namespace] = self._held.get(namespace, 0) + change
        if self._held[namespace] == 0:
            del self._held[namespace], self._tenants[namespace]


def _size(verdict: Verdict) -> int:
    return ENTRY_BYTES + len(verdict.text.encode())
