"""`SequenceBlocks`: a sequence's block table, from the prefix lookup to the release of its blocks.

Invariant: a table covers `num_computed_tokens`; its first `num_registered_blocks` entries are full and published.
"""

from collections import Counter
from collections.abc import Iterable

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.kv_cache.prefix_cache import PrefixCache


class SequenceBlocks:
    """Block tables over one `PrefixCache`. It never preempts: on False the scheduler has to make room."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.block_size = cache.block_size
        self._forked: dict[Sequence, None] = {}
        self._refused: tuple[Sequence, int] | None = None

    def open(self, sequence: Sequence, num_running: int) -> bool:
        """Find the cached prefix and take blocks for all known tokens, leaving one available per running sequence.

        Blocks from `fork` are kept without a lookup. A refused sequence is tried again only once more blocks are available.
        With nothing running, siblings that have not started give theirs back.
        """
        margin = self._cache.pool.num_available - num_running
        if self._refused is not None and self._refused[0] is sequence and margin <= self._refused[1]:
            return False
        self._refused = None
        while not self._take(sequence, num_running):
            if num_running or not self.reclaim(keep=sequence):
                self._refused = (sequence, margin)
                return False
        self._forked.pop(sequence, None)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Add a block at the end of the table; False when the pool has none."""
        fresh = self._cache.allocate(1, sequence.request.namespace)
        if fresh is None:
            return False
        sequence.block_table += fresh
        sequence.planned_block_table = tuple(sequence.block_table)
        return True

    def register(self, sequence: Sequence) -> None:
        """Publish the blocks that have become full since the last call."""
        shared = min(sequence.num_computed_tokens, len(self._shared_tokens(sequence)))
        full = shared // self.block_size
        chain = sequence.hash_chain
        if chain is None or full == sequence.num_registered_blocks:
            return
        table = sequence.block_table
        for index in range(sequence.num_registered_blocks, full):
            table[index] = self._cache.register(chain, index, table[index], sequence.token_ids)
        sequence.num_registered_blocks = full
        sequence.planned_block_table = tuple(table)

    def fork(self, first: Sequence, sibling: Sequence) -> None:
        """Share the full blocks of the prompt that `first` has computed; the sibling recomputes only the partial tail."""
        count = (len(first.request.prompt_token_ids) - 1) // self.block_size
        shared = first.block_table[:count]
        self._cache.share(shared)
        sibling.block_table = shared
        sibling.planned_block_table = tuple(shared)
        sibling.num_computed_tokens = count * self.block_size
        sibling.num_registered_blocks = count
        sibling.num_cached_tokens = first.num_cached_tokens
        if first.hash_chain is not None:
            sibling.hash_chain = first.hash_chain.fork(count)
        if shared:
            self._forked[sibling] = None

    def reclaim(self, keep: Sequence | None = None) -> bool:
        """Take shared blocks back from the newest forked sibling that has not started; it recomputes them later."""
        sibling = next((other for other in reversed(self._forked) if other is not keep), None)
        if sibling is None:
            return False
        self.close(sibling)
        return True

    def close(self, sequence: Sequence) -> None:
        """Give all blocks back. The tokens stay, so that they can be recomputed or found in the cache."""
        self._forked.pop(sequence, None)
        self._cache.release(sequence.block_table)
        sequence.block_table = []
        sequence.planned_block_table = ()
        sequence.num_computed_tokens = 0
        sequence.num_registered_blocks = 0

    def forget(self, sequence: Sequence) -> None:
        """Make this sequence's blocks unfindable in the prefix cache."""
        self._cache.forget(sequence.block_table)

    def fits_without(self, others: Iterable[Sequence], sequence: Sequence, num_running: int) -> bool:
        """Whether `open` succeeds once `others` and forked siblings have given their blocks back. O(blocks)."""
        closing = [*others, *(sibling for sibling in self._forked if sibling is not sequence)]
        uses = Counter(block for other in closing for block in other.block_table)
        pool = self._cache.pool
        freed = sum(pool.references(block) == count for block, count in uses.items())
        missing = self.blocks_for(len(sequence.token_ids)) - len(sequence.block_table)
        return pool.num_available + freed >= missing + num_running

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _shared_tokens(self, sequence: Sequence) -> list[int]:
        """Return the tokens whose blocks may be found and published."""
        return sequence.request.prompt_token_ids if self._cache.prompts_only else sequence.token_ids

    def _take(self, sequence: Sequence, spare: int) -> bool:
        cache = self._cache
        chain = sequence.hash_chain
        if chain is None:
            request = sequence.request
            chain = cache.chain(request.namespace, request.adapter, request.cache_salt)
            sequence.hash_chain = chain
        table = sequence.block_table
        # What has still to be scored has to be computed.
        scored = None if sequence.scores is None else sequence.scores.next_position
        matched = [] if table else cache.match(chain, self._shared_tokens(sequence), scored)
        missing = self.blocks_for(len(sequence.token_ids)) - len(table) - len(matched)
        enough = cache.pool.num_available >= missing + spare
        fresh = cache.allocate(missing, sequence.request.namespace) if enough else None
        if fresh is None:
            cache.release(matched)
            return False
        if matched:
            sequence.num_computed_tokens = len(matched) * self.block_size
            sequence.num_registered_blocks = len(matched)
        table += matched
        table += fresh
        sequence.planned_block_table = tuple(table)
        return True
