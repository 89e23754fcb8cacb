"""`DeviceAdapterMemory`: adapters of a GPU in one preallocated arena, in pages of 16 rank rows.

Invariant: no load calls the device's allocator, moves an adapter or waits for the device. A matrix of rank r takes r rows:
its last page is as short as possible, because no kernel reads beyond the rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.errors import AdapterTooLarge
from loraplex.engine.lora.memory.base import Placement
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter, pack, page_bytes
from loraplex.engine.lora.memory.page_copy import CopyStream, PageCopy
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.memory.rank_quantization import QuantizationReport, QuantizedModule
from loraplex.engine.lora.memory.slab_allocator import Allocation, SlabAllocator, choose_slab_bytes
from loraplex.engine.lora.memory.slot_entries import ModulePages
from loraplex.engine.lora.memory.slot_tables import Contents, SlotTables
from loraplex.engine.lora.page_geometry import PAGE_RANKS
from loraplex.engine.lora.site import LoraPart, LoraSite
from loraplex.engine.lora.weights import LoraModule, LoraWeights

MIN_SLAB_BYTES = 1 << 20
MIN_SLABS = 64
"""A small budget has smaller slabs, so that one slab for each page size does not use it up."""


@dataclass(frozen=True, slots=True)
class PagedSlice:
    """A `LoraPart` that gathers its matrices from their pages for the torch backend. Kernels follow the table instead."""

    storage: Tensor
    starts: tuple[tuple[int, ...], tuple[int, ...]]
    widths: tuple[int, int]
    dtype: torch.dtype
    rank: int
    scales: Tensor | None

    @property
    def a(self) -> Tensor:
        return self._matrix(0)

    @property
    def b(self) -> Tensor:
        return self._matrix(1)

    def _matrix(self, which: int) -> Tensor:
        return torch.cat(list(self._pages(which)))

    def _pages(self, which: int) -> Iterator[Tensor]:
        width = self.widths[which]
        for number, start in enumerate(self.starts[which]):
            rows = min(PAGE_RANKS, self.rank - number * PAGE_RANKS)
            content = self.storage[start : start + rows * width * self.dtype.itemsize]
            yield content.view(self.dtype).view(rows, width)


class PagedParts(Sequence[LoraPart | None]):
    """An adapter's parts of one site, created on access: on a GPU only embeddings access them."""

    def __init__(
        self,
        storage: Tensor,
        dtype: torch.dtype,
        modules: Mapping[str, ModulePages],
        starts: Sequence[int],
        site: LoraSite,
    ) -> None:
        self._storage = storage
        self._dtype = dtype
        self._modules = modules
        self._starts = starts
        self._site = site

    def __len__(self) -> int:
        return len(self._site.names)

    @overload
    def __getitem__(self, index: int) -> LoraPart | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LoraPart | None]: ...

    def __getitem__(self, index: int | slice) -> LoraPart | None | Sequence[LoraPart | None]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        module = self._modules.get(self._site.names[index])
        if module is None:
            return None
        return PagedSlice(
            storage=self._storage,
            starts=(self._places(module.a), self._places(module.b)),
            widths=(self._site.inputs, self._site.slice_sizes[index]),
            dtype=self._dtype,
            rank=module.rank,
            scales=self._scales(module),
        )

    def _places(self, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._starts[page] for page in pages)

    def _scales(self, module: ModulePages) -> Tensor | None:
        if module.scales is None:
            return None
        start = self._starts[module.scales]
        return self._storage[start : start + torch.float32.itemsize * module.rank].view(torch.float32)


class DeviceAdapterMemory:
    """Implements `AdapterMemory`. `start_copy` starts a copy on `stream`.

    `allocate_blob` returns uint8 host memory for an adapter being loaded, on the loader's thread.
    """

    def __init__(
        self,
        sites: Sequence[LoraSite],
        pages: PageFormat,
        *,
        max_bytes: int,
        max_slots: int,
        max_rank: int,
        device: torch.device,
        allocate_blob: Callable[[int], Tensor],
        stream: CopyStream,
        start_copy: Callable[[PageCopy], None],
        end_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_slots = max_slots
        self._sites = sites
        self._pages = pages
        self._tables = SlotTables(sites, max_slots, max_rank, device)
        self._arena = SlabAllocator(max_bytes, _slab_bytes(sites, pages, max_bytes))
        self._storage = torch.empty(self._arena.capacity_bytes, dtype=torch.uint8, device=device)
        self._base = self._storage.data_ptr()
        self._allocate_blob = allocate_blob
        self._stream = stream
        self._start_copy = start_copy
        self._end_copies = end_copies
        for site in sites:
            site.page_dtype = pages.page_dtype

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def waste_bytes(self) -> int:
        return self._arena.waste_bytes

    def pack(self, weights: LoraWeights) -> PackedAdapter:
        packed = self._packed(weights)
        if not self._arena.fits_empty(packed.need):
            raise AdapterTooLarge(
                f"adapter {weights.digest} takes {packed.blob.nbytes} bytes in pages; the arena of"
                f" {self._arena.num_slabs} slabs of {self._arena.slab_bytes} bytes cannot hold it"
            )
        return packed

    def fits(self, packed: PackedAdapter) -> bool:
        return self._arena.fits(packed.need)

    def victims(self, packed: PackedAdapter, idle: Iterable[Placement]) -> int | None:
        return self._arena.victims(packed.need, map(_allocation_of, idle))

    def place(self, slot: int, packed: PackedAdapter) -> Placement:
        allocation = self._arena.allocate(packed.need)
        copy = PageCopy(packed, allocation, self._storage, self._stream.computed(), self._contents)
        self._start_copy(copy)
        return Placement(slot, packed, allocation.nbytes, allocation, copy)

    def is_there(self, placement: Placement) -> bool:
        return _copy_of(placement).is_done()

    def install(self, placement: Placement) -> Placement:
        contents = _copy_of(placement).contents
        contents.install(self._sites, placement.slot)
        self._tables.write(placement.slot, contents.rows)
        return replace(placement, packed=placement.packed.without_blob(), copy=None)

    def remove(self, placement: Placement) -> None:
        self._tables.clear(placement.slot)
        for site in self._sites:
            site.slots.pop(placement.slot, None)
        self._arena.free(_allocation_of(placement))

    def close(self) -> None:
        self._end_copies()

    def _packed(self, weights: LoraWeights) -> PackedAdapter:
        pages, names = self._pages, self._tables.names
        report: QuantizationReport | None = None
        modules: Mapping[str, LoraModule | QuantizedModule]
        if pages.page_dtype is None:
            modules = {name: weights.modules[name] for name in names if name in weights.modules}
        else:
            modules, report = pages.quantized(weights, names)
        return pack(
            weights.digest,
            modules,
            pages.dtype,
            names=names,
            max_pages=self._tables.max_pages,
            by_size=True,
            allocate=self._allocate_blob,
            report=report,
        )

    def _contents(self, packed: PackedAdapter, starts: Sequence[int]) -> Contents:
        rows = self._tables.rows(packed, np.array(starts, dtype=np.int64) + self._base)
        return Contents(rows, [self._parts(packed, starts, site) for site in self._sites])

    def _parts(
        self, packed: PackedAdapter, starts: Sequence[int], site: LoraSite
    ) -> Sequence[LoraPart | None]:
        if not any(name in packed.modules for name in site.names):
            return ()
        return PagedParts(self._storage, self._pages.dtype, packed.modules, starts, site)


def _slab_bytes(sites: Sequence[LoraSite], pages: PageFormat, max_bytes: int) -> int:
    widths = {width for site in sites for width in (site.inputs, *site.slice_sizes)}
    sizes = [page_bytes(PAGE_RANKS, width, pages.dtype) for width in widths] or [1]
    return choose_slab_bytes(sizes, min(MIN_SLAB_BYTES, max(1, max_bytes // MIN_SLABS)))


def _copy_of(placement: Placement) -> PageCopy:
    if placement.copy is None:
        raise ValueError("this placement belongs to another memory")
    return placement.copy


def _allocation_of(placement: Placement) -> Allocation:
    if placement.allocation is None:
        raise ValueError("this placement belongs to another memory")
    return placement.allocation
