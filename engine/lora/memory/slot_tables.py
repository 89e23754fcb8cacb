"""`SlotTables`: the tables of all sites in one tensor, so that one operation changes a slot's entries without waiting.

Invariant: `LoraSite.table` of every site is a view of that tensor; an empty slot's entries are 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.page_geometry import PAGE_RANKS
from loraplex.engine.lora.site import A_PAGES, LoraPart, LoraSite, empty_table


@dataclass(frozen=True, slots=True)
class Contents:
    """What an installed adapter writes into the sites: its table rows, and its parts by site."""

    rows: Tensor
    parts: Sequence[Sequence[LoraPart | None]]

    def install(self, sites: Iterable[LoraSite], slot: int) -> None:
        """Install the parts at the sites; a site without any of the adapter's modules and parts is skipped."""
        for site, parts in zip(sites, self.parts, strict=True):
            if parts:
                site.slots[slot] = parts


class SlotTables:
    """Replaces the tables that the sites were created with; references to those see empty tables."""

    def __init__(
        self, sites: Sequence[LoraSite], max_slots: int, max_rank: int, device: torch.device
    ) -> None:
        self.names = tuple(name for site in sites for name in site.names)
        self.max_pages = -(-max_rank // PAGE_RANKS)
        columns = A_PAGES + 2 * self.max_pages
        self._pinned = device.type == "cuda"
        entries = max_slots * len(self.names) * columns
        self._flat = empty_table((entries,), device)
        # Of slot 0, and the distance to the next slot's entries: both by site, since a site's slots are contiguous.
        places: list[Tensor] = []
        steps: list[Tensor] = []
        begin = 0
        for site in sites:
            size = len(site.names) * columns
            end = begin + max_slots * size
            site.table = self._flat[begin:end].view(max_slots, len(site.names), columns)
            places.append(torch.arange(begin, begin + size))
            steps.append(torch.full((size,), size))
            begin = end
        self._places = torch.cat(places or [torch.empty(0, dtype=torch.int64)]).to(device)
        self._steps = torch.cat(steps or [torch.empty(0, dtype=torch.int64)]).to(device)

    def rows(self, packed: PackedAdapter, addresses: NDArray[np.int64]) -> Tensor:
        """Return an adapter's entries of all sites, in host memory; `addresses[i]` is the address of page i."""
        rows = torch.from_numpy(packed.rows.at(addresses))
        return rows.pin_memory() if self._pinned else rows

    def write(self, slot: int, rows: Tensor) -> None:
        """Write rows made by `rows`. Kernels launched later see them."""
        self._flat.index_copy_(0, self._at(slot), rows.to(self._flat.device, non_blocking=True))

    def clear(self, slot: int) -> None:
        """Set a slot to rank 0, which has no effect in any kernel."""
        self._flat.index_fill_(0, self._at(slot), 0)

    def _at(self, slot: int) -> Tensor:
        return self._places + slot * self._steps
