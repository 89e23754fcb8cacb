"""The tiles of a step's chunks."""

import pytest
import torch

from loraplex.engine.kernels.prefill_chunks import PREFILL_TILE, one_chunk, tile_bound, tiles_of


@pytest.mark.parametrize("lengths", [[1], [PREFILL_TILE], [PREFILL_TILE + 1, 1, 3 * PREFILL_TILE], []])
def test_tiles_cover_every_row_once_and_begin_with_their_chunk(lengths: list[int]) -> None:
    begins = [5 + sum(lengths[:chunk]) for chunk in range(len(lengths))]
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    chunks, firsts = tiles_of(begins, ends)
    rows = [
        row
        for chunk, first in zip(chunks, firsts, strict=True)
        for row in range(first, min(first + PREFILL_TILE, ends[chunk]))
    ]
    assert sorted(rows) == list(range(5, 5 + sum(lengths)))
    assert all(
        (first - begins[chunk]) % PREFILL_TILE == 0 for chunk, first in zip(chunks, firsts, strict=True)
    )
    assert len(chunks) <= tile_bound(sum(lengths), len(lengths))


@pytest.mark.parametrize(("rows", "chunks"), [(1, 1), (100, 1), (100, 3), (3, 8), (2048, 64)])
def test_the_bound_is_reached_and_not_passed(rows: int, chunks: int) -> None:
    count = min(rows, chunks)
    longest = rows - (count - 1)
    ends = [1 + chunk for chunk in range(count - 1)] + [count - 1 + longest]
    begins = [0, *ends[:-1]]
    assert len(tiles_of(begins, ends)[0]) == tile_bound(rows, chunks)


def test_one_chunk_is_the_end_of_its_sequence() -> None:
    chunks = one_chunk(40, 100, torch.arange(7, dtype=torch.int32))
    assert (chunks.begins.tolist(), chunks.ends.tolist(), chunks.lengths.tolist()) == ([0], [40], [100])
    assert chunks.tables.shape == (1, 7) and chunks.tile_begins.tolist() == [32, 0]
