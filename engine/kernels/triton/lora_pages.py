"""Shared by the Triton kernels of adapters: finding a page, and reading its elements.

Invariant: pages are reached by address, at the adapter's own rank; rank rows beyond it are never read.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.unpacking import byte_to_float
from loraplex.engine.lora.page_geometry import PAGE_RANKS
from loraplex.engine.lora.site import LoraSite

MAX_SLICES = 3
"""Slices that one launch takes: as many as qkv has."""

_PAGE_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def chunk_at(starts, ends, slots, chunk):  # type: ignore[no-untyped-def]
    """Return (slot, first place, end) of a chunk in `order`; all loads are issued at once."""
    slot = tl.load(slots + chunk).to(tl.int64)
    return slot, tl.load(starts + chunk), tl.load(ends + chunk)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_chunk(order, begin, end, block_m: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (rows [block_m] of a chunk, int64; a mask of the real ones: the others are row 0)."""
    members = begin + tl.arange(0, block_m)
    is_member = members < end
    return tl.load(order + members, mask=is_member, other=0).to(tl.int64), is_member


@triton.jit
def entry_at(table, slot, slices, part, pages):  # type: ignore[no-untyped-def]
    """Return the place of a slice's entry of a slot in a site's table."""
    return table + (slot * slices + part) * (2 + 2 * pages)


@triton.jit  # type: ignore[untyped-decorator]
def page_at(entry, index, page_type: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the page whose address is at `index` of an adapter's entry in the site's table."""
    page = tl.load(entry + index).to(tl.pointer_type(page_type))
    if aligned:
        page = tl.multiple_of(page, 16)
    return page


@triton.jit
def rank_at(entry, slot):  # type: ignore[no-untyped-def]
    """Return the rank of a slice's entry; 0 for a row of the base model, whose entry may be any."""
    return tl.load(entry, mask=slot >= 0, other=0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def widened(stored, dtype: tl.constexpr, assembly: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert elements of a page to `dtype`, exactly."""
    if stored.dtype == tl.int8:
        return byte_to_float(stored, dtype, assembly)
    else:
        return stored.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def rank_scales(entry, ranks, is_rank, is_scaled: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the factor of each rank's hidden value, or 1.0."""
    if is_scaled:
        return tl.load(tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + ranks, mask=is_rank, other=0.0)
    else:
        return 1.0


@triton.jit  # type: ignore[untyped-decorator]
def row_hidden(hidden, ranks, is_rank, split_stride, splits: tl.constexpr, split_lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return one row's hidden values [ranks]: the partial sums added up as a tree over K, each loaded by one lane."""
    split = tl.arange(0, split_lanes)
    shares = hidden + split[:, None] * split_stride + ranks[None, :]
    return tl.sum(tl.load(shares, mask=(split < splits)[:, None] & is_rank[None, :], other=0.0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def tile_hidden(hidden, mask, split_stride, splits: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the partial sums of a tile in the order of K. All loads are issued at once, since memory latency is the cost."""
    total = tl.load(hidden, mask=mask, other=0.0)
    for split in tl.static_range(1, splits):
        total += tl.load(hidden + split * split_stride, mask=mask, other=0.0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def column_tile(tile, size_0, size_1, size_2, aligned: tl.constexpr, block_n: tl.constexpr):  # type: ignore[no-untyped-def]
    """(slice, its width, its first column in y, the tile's first column in the slice) of a tile of all slices' columns."""
    before_1 = tl.cdiv(size_0, block_n)
    before_2 = before_1 + tl.cdiv(size_1, block_n)
    is_0 = tile < before_1
    is_1 = tile < before_2
    part = tl.where(is_0, 0, tl.where(is_1, 1, 2))
    size = tl.where(is_0, size_0, tl.where(is_1, size_1, size_2))
    offset = tl.where(is_0, 0, tl.where(is_1, size_0, size_0 + size_1))
    column = (tile - tl.where(is_0, 0, tl.where(is_1, before_1, before_2))) * block_n
    if aligned:
        size = tl.multiple_of(size, 16)
        offset = tl.multiple_of(offset, 16)
        column = tl.multiple_of(column, block_n)
    return part, size, offset, column


def page_type(site: LoraSite, model_dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a page's element type."""
    return _PAGE_TYPES[site.page_dtype or model_dtype]


def hidden_ranks(site: LoraSite) -> int:
    """Hidden values that a row has room for in a slice."""
    return site.max_pages * PAGE_RANKS


def sizes_of(site: LoraSite) -> tuple[int, ...]:
    """Widths of `MAX_SLICES` slices, 0 for those a site lacks. Raises `ValueError` for a site of more."""
    if len(site.slice_sizes) > MAX_SLICES:
        raise ValueError(f"a site has at most {MAX_SLICES} slices, got {site.names}")
    return (*site.slice_sizes, *(0,) * (MAX_SLICES - len(site.slice_sizes)))


def is_aligned(*row_lengths: int) -> bool:
    """Whether every row of a page starts at 16 bytes, given that the page does (`LoraSite`)."""
    return all(length % 16 == 0 for length in row_lengths)
