"""`PrefixCache`: finds full KV blocks by a chained, keyed hash (BLAKE2b, RFC 7693) of all tokens up to their end.

Invariant: two requests share a block only if model, tenant, adapter, cache dtype, salt and every token up to the block's
end are equal. Only full blocks are shared, and a cached block's parent outlives it.
"""

import os
from collections.abc import Iterable, Sequence

from loraplex.engine.batch.block_hash import DIGEST_BYTES, HashChain, keyed_hash
from loraplex.engine.kv_cache.block_pool import BlockPool
from loraplex.engine.messages import AdapterRef


class PrefixCache:
    """Manages the blocks of `pool`. With `enabled` false nothing is hashed, found or kept.

    `prompts_only`: only blocks that hold nothing but a prompt are found and kept. Decoding may round differently, so that a
    response would depend on who computed its prefix.
    `key` is secret and, by default, random per process: digests cannot be predicted from outside.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        model_digest: str,
        cache_dtype: str,
        enabled: bool = True,
        prompts_only: bool = False,
        key: bytes | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.prompts_only = prompts_only
        self._key = os.urandom(DIGEST_BYTES) if key is None else key
        self._model_digest = model_digest.encode()
        self._cache_dtype = cache_dtype.encode()
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._namespaces: dict[int, bytes] = {}

    def chain(self, namespace: bytes, adapter: AdapterRef | None = None, salt: bytes = b"") -> HashChain:
        """Return an empty chain whose root binds model, tenant, adapter, cache dtype and salt."""
        parts = [(b"model", self._model_digest), (b"tenant", namespace), (b"dtype", self._cache_dtype)]
        if adapter is not None:
            parts += [(b"adapter tenant", adapter.namespace), (b"adapter", adapter.digest.encode())]
        if salt:
            parts.append((b"salt", salt))
        data = b"".join(_length_prefixed(name) + _length_prefixed(value) for name, value in parts)
        return HashChain(self._key, keyed_hash(self._key, b"root", data), self.block_size, namespace)

    def match(self, chain: HashChain, token_ids: Sequence[int], most: int | None = None) -> list[int]:
        """Return the longest cached run of leading full blocks, of at most `most` tokens, and take one reference on each.

        At least one token is left to compute, so that there are logits to sample from.
        """
        found: list[int] = []
        if not self.enabled:
            return found
        covered = len(token_ids) - 1 if most is None else min(most, len(token_ids) - 1)
        for index in range(covered // self.block_size):
            block = self._blocks.get(chain.digest(index, token_ids))
            if block is None:
                break
            self.pool.retain(block)
            found.append(block)
        return found

    def allocate(self, count: int, namespace: bytes) -> list[int] | None:
        """Return `count` private blocks for a tenant, evicting cached ones as needed; None when there are too few."""
        pool = self.pool
        if pool.num_available < count:
            return None
        while pool.num_free < count:
            self._drop(pool.evict(namespace))
        return [pool.take() for _ in range(count)]

    def register(self, chain: HashChain, index: int, block: int, token_ids: Sequence[int]) -> int:
        """Publish the full, computed block `index` and return the block to use from now on.

        That is another block when an equal one was published first: `block` is then given back.
        """
        if not self.enabled:
            return block
        digest = chain.digest(index, token_ids)
        known = self._blocks.get(digest)
        if known is None:
            self._blocks[digest] = block
            self._digests[block] = digest
            self._namespaces[block] = chain.namespace
            return block
        if known != block:
            self.pool.retain(known)
            self.pool.release(block, owner=None)
        return known

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, within one request."""
        for block in blocks:
            self.pool.retain(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one sequence's blocks, the deepest first, so that eviction cuts chains from their end."""
        for block in reversed(blocks):
            self.pool.release(block, owner=self._namespaces.get(block))

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable, for instance because their content may hold NaN."""
        for block in blocks:
            if block in self._digests:
                self._drop(block)
                if self.pool.is_cached(block):
                    self.pool.free_cached(block)

    def forget_namespace(self, namespace: bytes) -> None:
        """Make a tenant's blocks unfindable; those in use are freed with their last reference. O(published blocks)."""
        self.forget([block for block, owner in self._namespaces.items() if owner == namespace])

    def clear(self) -> None:
        """Forget every published block."""
        self.forget(list(self._digests))

    def _drop(self, block: int) -> None:
        del self._blocks[self._digests.pop(block)]
        del self._namespaces[block]


def _length_prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
