"""Installs tensors of a test at a `LoraSite`, where the product installs an adapter's pages at all sites at once."""

import torch

from loraplex.engine.lora.page_geometry import PAGE_RANKS
from loraplex.engine.lora.site import LoraSite, LoraSlice


def install(site: LoraSite, slot: int, slices: tuple[LoraSlice | None, ...]) -> None:
    """Install an adapter's tensors in `slot`. On CUDA each starts at a multiple of `ALIGNMENT` bytes."""
    site.slots[slot] = slices
    site.table[slot] = torch.tensor([_entry(site, s) for s in slices], dtype=torch.int64)


def remove(site: LoraSite, slot: int) -> None:
    """Clear `slot`; its rank becomes 0, which has no effect in any kernel."""
    site.slots.pop(slot, None)
    site.table[slot] = 0


def _entry(site: LoraSite, part: LoraSlice | None) -> list[int]:
    if part is None:
        return [0] * site.table.shape[2]
    scales = 0 if part.scales is None else part.scales.data_ptr()
    return [part.rank, scales, *_pages(part.a, site.max_pages), *_pages(part.b, site.max_pages)]


def _pages(matrix: torch.Tensor, max_pages: int) -> list[int]:
    """Return addresses of the pages of a contiguous [rank, width], 0 beyond them."""
    page_bytes = PAGE_RANKS * matrix.shape[1] * matrix.element_size()
    pages = -(-matrix.shape[0] // PAGE_RANKS)
    return [matrix.data_ptr() + page * page_bytes for page in range(pages)] + [0] * (max_pages - pages)
