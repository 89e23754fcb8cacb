"""`HostAdapterMemory`: adapters on the CPU. Kernels read the loader's blob; nothing is copied.

Invariant: the pages of a matrix are contiguous, so that a kernel may read it whole, and have the model's type. Adapters
that should be quantized are quantized and expanded again, which shows the effect on responses but saves no memory.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.errors import AdapterTooLarge
from loraplex.engine.lora.memory.base import Placement
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter, pack
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.memory.slot_entries import ModulePages
from loraplex.engine.lora.memory.slot_tables import Contents, SlotTables
from loraplex.engine.lora.site import LoraSite, LoraSlice
from loraplex.engine.lora.weights import LoraWeights


class HostAdapterMemory:
    """Implements `AdapterMemory` for sites on the CPU."""

    def __init__(
        self, sites: Sequence[LoraSite], pages: PageFormat, *, max_bytes: int, max_slots: int, max_rank: int
    ) -> None:
        self.max_bytes = max_bytes
        self.max_slots = max_slots
        self.used_bytes = 0
        self.waste_bytes = 0
        self._sites = sites
        self._pages = pages
        self._tables = SlotTables(sites, max_slots, max_rank, torch.device("cpu"))

    def pack(self, weights: LoraWeights) -> PackedAdapter:
        elements = sum(module.a.numel() + module.b.numel() for module in weights.modules.values())
        nbytes = elements * self._pages.model_dtype.itemsize
        if nbytes > self.max_bytes:
            raise AdapterTooLarge(
                f"adapter {weights.digest} takes {nbytes} bytes of at most {self.max_bytes}"
            )
        modules, report = self._pages.rounded(weights, self._tables.names)
        return pack(
            weights.digest,
            modules,
            self._pages.model_dtype,
            names=self._tables.names,
            max_pages=self._tables.max_pages,
            by_size=False,
            report=report,
        )

    def fits(self, packed: PackedAdapter) -> bool:
        return self.used_bytes + packed.nbytes <= self.max_bytes

    def victims(self, packed: PackedAdapter, idle: Iterable[Placement]) -> int | None:
        missing, count = self.used_bytes + packed.nbytes - self.max_bytes, 0
        for placement in idle:
            if missing <= 0:
                break
            missing -= placement.nbytes
            count += 1
        return count if missing <= 0 else None

    def place(self, slot: int, packed: PackedAdapter) -> Placement:
        self.used_bytes += packed.nbytes
        return Placement(slot, packed, packed.nbytes)

    def is_there(self, placement: Placement) -> bool:
        return True

    def install(self, placement: Placement) -> Placement:
        packed, slot = placement.packed, placement.slot
        starts = np.array([page.start for page in packed.pages], dtype=np.int64)
        rows = self._tables.rows(packed, starts + packed.blob.data_ptr())
        Contents(rows, [self._slices(packed, site) for site in self._sites]).install(self._sites, slot)
        self._tables.write(slot, rows)
        return placement

    def remove(self, placement: Placement) -> None:
        self._tables.clear(placement.slot)
        for site in self._sites:
            site.slots.pop(placement.slot, None)
        self.used_bytes -= placement.nbytes

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def _slices(self, packed: PackedAdapter, site: LoraSite) -> tuple[LoraSlice | None, ...]:
        slices = tuple(self._slice(packed, site, s) for s in range(len(site.names)))
        return slices if any(part is not None for part in slices) else ()

    def _slice(self, packed: PackedAdapter, site: LoraSite, s: int) -> LoraSlice | None:
        module = packed.modules.get(site.names[s])
        if module is None:
            return None
        a = self._matrix(packed, module, module.a, site.inputs)
        return LoraSlice(a, self._matrix(packed, module, module.b, site.slice_sizes[s]))

    def _matrix(self, packed: PackedAdapter, module: ModulePages, pages: Sequence[int], width: int) -> Tensor:
        dtype = self._pages.model_dtype
        start = packed.pages[pages[0]].start
        content = packed.blob[start : start + module.rank * width * dtype.itemsize]
        return content.view(dtype).view(module.rank, width)
