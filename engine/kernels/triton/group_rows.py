"""Builds the chunk list of a step on the device from the rows' adapter slots: a counting sort by comparison, no atomics.

Invariant: the list depends on the slots alone; rows of one slot keep their order, rows of the base model come last.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.lora.device_batch import ChunkBuffers

BLOCK = 64
"""Rows per program, compared with as many at a time. A decode step is one program; 8192 rows are 1M comparisons each."""
NUM_WARPS = 4


@triton.jit
def sort_key(slots):  # type: ignore[no-untyped-def]
    """Sort rows of the base model after all adapters."""
    return tl.where(slots < 0, 2147483647, slots)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def order_kernel(row_slots, order, places, num_rows, block: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Write each row to its place in `order`, and its place among the rows of its slot."""
    rows = tl.program_id(0) * block + tl.arange(0, block)
    key = sort_key(tl.load(row_slots + rows, mask=rows < num_rows, other=-1))
    lower = tl.zeros((block,), dtype=tl.int32)
    place = tl.zeros((block,), dtype=tl.int32)
    for first in range(0, num_rows, block):
        others = first + tl.arange(0, block)
        is_row = (others < num_rows)[None, :]
        other_key = sort_key(tl.load(row_slots + others, mask=others < num_rows, other=-1))[None, :]
        is_earlier = (other_key == key[:, None]) & (others[None, :] < rows[:, None])
        lower += tl.sum((is_row & (other_key < key[:, None])).to(tl.int32), axis=1)
        place += tl.sum(is_earlier.to(tl.int32), axis=1)
    tl.store(order + lower + place, rows, mask=rows < num_rows)
    tl.store(places + rows, place, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])  # type: ignore[untyped-decorator]
def chunk_kernel(  # type: ignore[no-untyped-def]
    row_slots,
    places,
    starts,
    ends,
    slots,
    num_rows,
    num_chunks,
    chunk_rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """The row at every `chunk_rows`-th place of a slot writes its chunk. The first program empties the unused chunks."""
    rows = tl.program_id(0) * block + tl.arange(0, block)
    slot = tl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    key = sort_key(slot)
    chunk = tl.zeros((block,), dtype=tl.int32)
    start = tl.zeros((block,), dtype=tl.int32)
    remaining = tl.zeros((block,), dtype=tl.int32)
    used = 0
    for first in range(0, num_rows, block):
        others = first + tl.arange(0, block)
        is_row = others < num_rows
        other_key = sort_key(tl.load(row_slots + others, mask=is_row, other=-1))[None, :]
        is_head = is_row & (tl.load(places + others, mask=is_row, other=1) % chunk_rows == 0)
        is_same = is_row[None, :] & (other_key == key[:, None])
        is_earlier = others[None, :] < rows[:, None]
        is_ahead = (is_row[None, :] & (other_key < key[:, None])) | (is_same & is_earlier)
        start += tl.sum(is_ahead.to(tl.int32), axis=1)
        chunk += tl.sum((is_ahead & is_head[None, :]).to(tl.int32), axis=1)
        remaining += tl.sum((is_same & (others[None, :] >= rows[:, None])).to(tl.int32), axis=1)
        used += tl.sum(is_head.to(tl.int32), axis=0)
    place = tl.load(places + rows, mask=rows < num_rows, other=1)
    begins = (rows < num_rows) & (place % chunk_rows == 0) & (chunk < num_chunks)
    tl.store(starts + chunk, start, mask=begins)
    tl.store(ends + chunk, start + tl.minimum(remaining, chunk_rows), mask=begins)
    tl.store(slots + chunk, slot, mask=begins)
    if tl.program_id(0) == 0:
        for first in range(0, num_chunks, block):
            chunks = first + tl.arange(0, block)
            is_left = (chunks >= used) & (chunks < num_chunks)
            tl.store(starts + chunks, 0, mask=is_left)
            tl.store(ends + chunks, 0, mask=is_left)
            tl.store(slots + chunks, -1, mask=is_left)


def group_rows(row_slots: torch.Tensor, chunk_rows: int, into: ChunkBuffers) -> None:
    """Fill `into` with the chunks of `row_slots` int32 [rows]; it has room for `chunk_bound` or more."""
    num_rows, num_chunks = row_slots.shape[0], into.slots.shape[0]
    grid = (triton.cdiv(num_rows, BLOCK),)
    order_kernel[grid](row_slots, into.order, into.places, num_rows, block=BLOCK, num_warps=NUM_WARPS)
    chunk_kernel[grid](
        row_slots,
        into.places,
        into.starts,
        into.ends,
        into.slots,
        num_rows,
        num_chunks,
        chunk_rows=chunk_rows,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )
