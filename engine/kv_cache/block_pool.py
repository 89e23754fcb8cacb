"""`BlockPool`: the fixed KV blocks and their reference counts (PagedAttention, Kwon et al. 2023).

Invariant: every block is exactly one of free, cached (unreferenced, content kept) or referenced, so that
`num_free + num_cached + num_referenced == total`. Every operation is O(1).
"""

from collections import OrderedDict


class BlockPool:
    """Blocks `0 ... total - 1`, all usable. The pool does not know their content."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {total}")
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

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
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """Drop a reference; the last one leaves the block cached (`keep`) or free."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not referenced")
        self._references[block] -= 1
        if self._references[block]:
            return
        if keep:
            self._cached[block] = None
        else:
            self._free.append(block)

    def evict_oldest(self) -> int:
        """Free the cached block released longest ago and return it. Raises `ValueError` when none is cached."""
        if not self._cached:
            raise ValueError("no block is cached")
        block, _ = self._cached.popitem(last=False)
        self._free.append(block)
        return block

    def free_cached(self, block: int) -> None:
        """Free one cached block at once, whatever its age."""
        if block not in self._cached:
            raise ValueError(f"block {block} is not cached")
        del self._cached[block]
        self._free.append(block)
