"""`BlockPool`: the fixed KV blocks and their reference counts (PagedAttention, Kwon et al. 2023).

Invariant: every block is exactly one of free, cached (unreferenced, content kept) or referenced, so that
`num_free + num_cached + num_referenced == total`. Every operation is O(1).
"""

import time
from collections.abc import Callable

from loraplex.engine.kv_cache.cached_blocks import CachedBlocks


class BlockPool:
    """Blocks `0 ... total - 1`, all usable. The pool does not know their content, only whose a cached one is."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {total}")
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._cached = CachedBlocks(clock)

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content may be reused until they are evicted."""
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return len(self._references) - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now, evicting cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def take(self) -> int:
        """Return a free block with one reference. Raises `ValueError` when none is free."""
        if not self._free:
            raise ValueError("no block is free")
        block = self._free.pop()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a cached or referenced block. Raises `ValueError` for a free one."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is free and holds nothing to share")
            self._cached.reuse(block)
        self._references[block] += 1

    def release(self, block: int, owner: bytes | None) -> None:
        """Drop a reference; the last one leaves the block cached for the tenant `owner`, or free if that is None."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not referenced")
        self._references[block] -= 1
        if self._references[block]:
            return
        if owner is None:
            self._free.append(block)
        else:
            self._cached.add(block, owner)

    def evict(self, requester: bytes) -> int:
        """Free a cached block for a tenant's request and return it; see `CachedBlocks.next_victim`.

        Raises `ValueError` when none is cached.
        """
        if not self._cached:
            raise ValueError("no block is cached")
        block = self._cached.next_victim(requester)
        self.free_cached(block)
        return block

    def free_cached(self, block: int) -> None:
        """Free one cached block at once, whatever its age."""
        if block not in self._cached:
            raise ValueError(f"block {block} is not cached")
        self._cached.remove(block)
        self._free.append(block)
