"""`SlabAllocator`: assigns bytes of one preallocated budget to pages (Bonwick's slabs). Pure bookkeeping, no tensor.

Invariant: pages never overlap, never move and never leave the budget. A slab has pages of one size and returns when its
last page does. A slab is taken only when no page of the wanted size is free, so unused bytes of a size lie in its own
slabs.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Allocation:
    """Byte offsets by page size, ascending within a slab. `slabs`: which pages of which slab, as bits."""

    offsets: Mapping[int, list[int]]
    slabs: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        return sum(size * len(offsets) for size, offsets in self.offsets.items())


@dataclass(slots=True)
class _Slab:
    page_bytes: int
    pages: int
    free: int

    @property
    def num_free(self) -> int:
        return self.free.bit_count()


@dataclass(slots=True)
class _Size:
    """The slabs of one page size: how many there are, which have a free page, and how many free pages they have together."""

    num_slabs: int = 0
    num_free: int = 0
    partial: dict[int, None] = field(default_factory=dict)


class SlabAllocator:
    """Allocates pages. In all methods `need` maps page sizes in bytes to counts."""

    def __init__(self, nbytes: int, slab_bytes: int) -> None:
        """The budget is rounded down to whole slabs."""
        if slab_bytes < 1:
            raise ValueError(f"slab_bytes must be at least 1, got {slab_bytes}")
        self.slab_bytes = slab_bytes
        self.num_slabs = max(0, nbytes) // slab_bytes
        self.used_bytes = 0
        # A heap: slabs that are taken together lie side by side where they can, and so do the pages of an adapter.
        self._free_slabs = list(range(self.num_slabs))
        self._slabs: dict[int, _Slab] = {}
        self._sizes: dict[int, _Size] = {}

    @property
    def capacity_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of slabs that hold at least one page."""
        return len(self._slabs) * self.slab_bytes

    @property
    def waste_bytes(self) -> int:
        """Reserved bytes without a page: free pages, and the end of a slab that is no multiple of its page size."""
        return self.reserved_bytes - self.used_bytes

    def fits(self, need: Mapping[int, int]) -> bool:
        """Whether `allocate` has room now."""
        free = {size: self._sizes[size].num_free for size in need if size in self._sizes}
        return self._slabs_for(need, free) <= len(self._free_slabs)

    def fits_empty(self, need: Mapping[int, int]) -> bool:
        """Whether `allocate` would have room if nothing were allocated. Constant, so any thread may call it."""
        return self._slabs_for(need, {}) <= self.num_slabs

    def victims(self, need: Mapping[int, int], candidates: Iterable[Allocation]) -> int | None:
        """How many of `candidates`, from the first on, must be freed for `allocate` to have room; None: all are too few."""
        free = {size: self._sizes[size].num_free if size in self._sizes else 0 for size in need}
        free_slabs = len(self._free_slabs)
        freed: dict[int, int] = {}
        count = 0
        for allocation in candidates:
            if self._slabs_for(need, free) <= free_slabs:
                return count
            count += 1
            for index, bits in allocation.slabs.items():
                free_slabs += self._free_in_thought(index, bits, free, freed)
        return count if self._slabs_for(need, free) <= free_slabs else None

    def _free_in_thought(self, index: int, bits: int, free: dict[int, int], freed: dict[int, int]) -> bool:
        """Count what freeing `bits` of a slab would return; True when the whole slab would return."""
        slab = self._slabs[index]
        before = slab.free | freed.get(index, 0)
        freed[index] = freed.get(index, 0) | bits
        returns = (before | bits).bit_count() == slab.pages
        if slab.page_bytes in free:
            free[slab.page_bytes] += -before.bit_count() if returns else bits.bit_count()
        return returns

    def allocate(self, need: Mapping[int, int]) -> Allocation:
        """Allocate all of `need`. Raises `ValueError`, and allocates nothing, when it does not fit."""
        if not self.fits(need):
            raise ValueError("the arena has no room for these pages")
        offsets: dict[int, list[int]] = {}
        slabs: dict[int, int] = {}
        for page_bytes, count in need.items():
            if count:
                offsets[page_bytes] = self._take(page_bytes, count, slabs)
        allocation = Allocation(offsets, slabs)
        self.used_bytes += allocation.nbytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give every page back. Raises `ValueError` for one that is free already."""
        for index, bits in allocation.slabs.items():
            slab = self._slabs.get(index)
            if slab is None or slab.free & bits:
                raise ValueError(f"pages of slab {index} are freed twice")
            slab.free |= bits
            size = self._sizes[slab.page_bytes]
            size.num_free += bits.bit_count()
            size.partial[index] = None
            if slab.num_free == slab.pages:
                self._return(index, slab, size)
        self.used_bytes -= allocation.nbytes

    def _slabs_for(self, need: Mapping[int, int], free: Mapping[int, int]) -> int:
        """Return the slabs needed in addition to `free` pages; more than exist when a page exceeds a slab."""
        slabs = 0
        for page_bytes, count in need.items():
            missing = count - free.get(page_bytes, 0)
            if missing <= 0:
                continue
            if page_bytes > self.slab_bytes:
                return self.num_slabs + 1
            slabs += -(-missing // (self.slab_bytes // page_bytes))
        return slabs

    def _take(self, page_bytes: int, count: int, slabs: dict[int, int]) -> list[int]:
        """Take pages of the fullest slabs first, so that others may empty; then of new slabs."""
        size = self._sizes.setdefault(page_bytes, _Size())
        offsets: list[int] = []
        for index in sorted(size.partial, key=lambda index: self._slabs[index].num_free):
            if len(offsets) == count:
                return offsets
            offsets += self._take_of(index, size, count - len(offsets), slabs)
        while len(offsets) < count:
            index = heapq.heappop(self._free_slabs)
            pages = self.slab_bytes // page_bytes
            self._slabs[index] = _Slab(page_bytes, pages, (1 << pages) - 1)
            size.num_slabs += 1
            size.num_free += pages
            size.partial[index] = None
            offsets += self._take_of(index, size, count - len(offsets), slabs)
        return offsets

    def _take_of(self, index: int, size: _Size, count: int, slabs: dict[int, int]) -> list[int]:
        """Take at most `count` pages of one slab, lowest first, a run of free ones at a time."""
        slab = self._slabs[index]
        left, taken = slab.free, 0
        positions: list[int] = []
        while left and len(positions) < count:
            start = (left & -left).bit_length() - 1
            ones = left >> start
            run = min((~ones & (ones + 1)).bit_length() - 1, count - len(positions))
            bits = ((1 << run) - 1) << start
            left ^= bits
            taken |= bits
            positions += range(start, start + run)
        slab.free = left
        size.num_free -= len(positions)
        if not left:
            del size.partial[index]
        slabs[index] = taken
        base = index * self.slab_bytes
        return [base + position * slab.page_bytes for position in positions]

    def _return(self, index: int, slab: _Slab, size: _Size) -> None:
        del self._slabs[index]
        del size.partial[index]
        size.num_free -= slab.pages
        size.num_slabs -= 1
        if not size.num_slabs:
            del self._sizes[slab.page_bytes]
        heapq.heappush(self._free_slabs, index)


def choose_slab_bytes(page_sizes: Iterable[int], least: int = 1 << 20) -> int:
    """Return the slab size, between `least` and twice that, that wastes least at its end for the worst of these page sizes.

    Never smaller than a page. A slab of `least` bytes bounds what one page size may leave unused.
    """
    sizes = sorted(set(page_sizes))
    least = max(least, sizes[-1])
    candidates = {
        -(-least // size) * size + extra * size for size in sizes for extra in range(least // size + 1)
    }

    def worst_end(slab: int) -> float:
        return max(slab % size / slab for size in sizes)

    return min(sorted(c for c in candidates if c <= 2 * least), key=worst_end)
