"""Which replicas probably have the beginning of a prompt in their prefix caches: where a router sent it before.

Invariants: digests are keyed by the tenant's namespace, and a lookup sees its own tenant's entries only; a tenant within its
fair share (the index divided by its tenants) never loses an entry to another tenant.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from loraplex.engine.kv_cache.tenant_sizes import TenantSizes
from loraplex.engine.messages import AdapterKey

SHORTEST_TOKENS: Final = 64
DIGEST_BYTES: Final = 16
REPLICAS_PER_PREFIX: Final = 4
ENTRY_BYTES: Final = 320
"""Of a digest, its replicas and its place in the order, as CPython lays them out; the ids themselves are shared."""


class PromptPrefix(NamedTuple):
    """The first tokens of a prompt: their share of it, and their digest."""

    share: float
    digest: bytes


def prompt_prefixes(
    namespace: bytes, adapter: AdapterKey | None, cache_salt: bytes, token_ids: Sequence[int]
) -> list[PromptPrefix]:
    """Digests of the first 64, 128, 256, ... tokens of a prompt, shortest first.

    As in the engine's prefix cache, a digest is of one tenant, one adapter and one salt. `namespace` has at most 64 bytes.
    """
    state = blake2b(digest_size=DIGEST_BYTES, key=namespace, person=b"placement")
    root = ("" if adapter is None else adapter[1]).encode()
    state.update(b"%d|%d|" % (len(root), len(cache_salt)) + root + cache_salt)
    found, start, end = [], 0, SHORTEST_TOKENS
    while end <= len(token_ids):
        state.update(array("I", token_ids[start:end]).tobytes())
        found.append(PromptPrefix(end / len(token_ids), state.digest()))
        start, end = end, 2 * end
    return found


class PrefixIndex:
    """Remembers the newest replicas of each prefix, in at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_entries = max(max_bytes // ENTRY_BYTES, 1)
        self._tenants: dict[bytes, OrderedDict[bytes, tuple[str, ...]]] = {}
        self._sizes = TenantSizes()
        self._entries = 0

    @property
    def size_bytes(self) -> int:
        """Estimated memory of all entries."""
        return self._entries * ENTRY_BYTES

    def record(self, namespace: bytes, prefixes: Sequence[PromptPrefix], replica_id: str) -> None:
        """Remember that a prompt with these prefixes went to a replica."""
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = OrderedDict()
        before = len(tenant)
        for prefix in prefixes:
            others = [each for each in tenant.pop(prefix.digest, ()) if each != replica_id]
            tenant[prefix.digest] = (replica_id, *others[: REPLICAS_PER_PREFIX - 1])
        self._resized(namespace, len(tenant) - before)
        while self._entries > self._max_entries:
            self._evict()

    def shares(self, namespace: bytes, prefixes: Sequence[PromptPrefix]) -> dict[str, float]:
        """By replica, the share of the prompt that was sent there before."""
        tenant = self._tenants.get(namespace)
        found: dict[str, float] = {}
        if tenant is None:
            return found
        for prefix in reversed(prefixes):
            for replica_id in tenant.get(prefix.digest, ()):
                found.setdefault(replica_id, prefix.share)
        return found

    def _evict(self) -> None:
        """Drop the entry of a largest tenant that was used longest ago."""
        namespace = self._sizes.largest()
        self._tenants[namespace].popitem(last=False)
        self._resized(namespace, -1)

    def _resized(self, namespace: bytes, by: int) -> None:
        self._entries += by
        self._sizes.change(namespace, by)
        if not self._tenants[namespace]:
            del self._tenants[namespace]
