"""`PrefillChunks`: the prefill chunks of a step as the kernels take them.

Invariant: the tensors follow from the step's plan alone, so a captured step has a fixed number of chunks, tiles and columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PREFILL_TILE = 32
"""Most rows of a tile. Tiles are counted from the begin of their chunk."""


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """C chunks, each the last tokens of one sequence, and their N tiles of at most `PREFILL_TILE` rows.

    begins, ends int32 [C]: first row, and the row behind the last; lengths int32 [C]: tokens of the sequence with the chunk;
    tables int32 [C, columns]; tile_chunks, tile_begins int32 [N]: a tile's chunk and first row. Padding: tiles of chunk -1,
    and chunks without rows, which no tile names.
    """

    begins: Tensor
    ends: Tensor
    lengths: Tensor
    tables: Tensor
    tile_chunks: Tensor
    tile_begins: Tensor


def tiles_of(begins: Sequence[int], ends: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each tile's chunk and first row. The last rows of a chunk come first, since they see the most keys."""
    tiles = [
        (chunk, first)
        for chunk, (begin, end) in enumerate(zip(begins, ends, strict=True))
        for first in reversed(range(begin, end, PREFILL_TILE))
    ]
    return [chunk for chunk, _ in tiles], [first for _, first in tiles]


def tile_bound(rows: int, chunks: int) -> int:
    """Return the most tiles that at most `chunks` chunks of `rows` rows in all can have."""
    count = min(rows, chunks)
    return count + (rows - count) // PREFILL_TILE


def one_chunk(rows: int, length: int, table: Tensor) -> PrefillChunks:
    """Return the last `rows` of `length` tokens of one sequence as the only chunk of a step; `table` int32 [columns]."""
    tile_chunks, tile_begins = tiles_of([0], [rows])

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=table.device)

    return PrefillChunks(
        begins=column([0]),
        ends=column([rows]),
        lengths=column([length]),
        tables=table.unsqueeze(0),
        tile_chunks=column(tile_chunks),
        tile_begins=column(tile_begins),
    )
