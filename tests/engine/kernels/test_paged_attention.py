"""Attention over block tables against dense softmax in float64: ragged lengths, windows, grouped heads, scattered blocks.

Every block outside the tables, and every place of a block behind the length, holds NaN.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.kernels.cpu import paged_attention as compiled
from loraplex.engine.kernels.paged_attention import prefill_attention
from loraplex.engine.kernels.prefill_chunks import PrefillChunks, one_chunk
from loraplex.engine.kernels.reference import paged_attention as reference

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
BLOCK_SIZE = 16
LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 257, 300]
# heads, KV heads, head size
GEOMETRIES = [(2, 2, 64), (9, 3, 64), (8, 1, 128), (6, 2, 96), (3, 1, 16), (72, 1, 512)]


class Sequences:
    """Random K and V of ragged sequences, scattered over a cache that is NaN elsewhere."""

    def __init__(
        self, lengths: list[int], geometry: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.lengths = lengths
        self.heads, self.kv_heads, self.size = geometry
        self.scale = self.size**-0.5
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = torch.randperm(sum(counts) + 3, generator=generator)[: sum(counts)].to(torch.int32)
        shape = (sum(counts) + 3, BLOCK_SIZE, 2, self.kv_heads, self.size)
        self.cache = torch.full(shape, torch.nan, dtype=dtype)
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.kv = []
        for row, (length, table) in enumerate(zip(lengths, torch.split(blocks, counts), strict=True)):
            kv = torch.randn((length, 2, self.kv_heads, self.size), generator=generator).to(dtype)
            places = (table.long().unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
            self.cache.view(-1, 2, self.kv_heads, self.size)[places] = kv
            self.tables[row, : len(table)] = table
            self.kv.append(kv)

    def queries(self, rows: int, seed: int = 1) -> Tensor:
        """[rows, (heads + 2 kv_heads) * size]; what follows the queries holds NaN."""
        generator = torch.Generator().manual_seed(seed)
        columns = (self.heads + 2 * self.kv_heads) * self.size
        qkv = torch.full((rows, columns), torch.nan, dtype=self.cache.dtype)
        values = 2 * torch.randn((rows, self.heads * self.size), generator=generator)
        qkv[:, : values.shape[1]] = values.to(qkv.dtype)
        return qkv

    def dense(self, sequence: int, query: Tensor, visible: int, window: int | None) -> Tensor:
        """One query [heads * size] over the first `visible` tokens, in float64."""
        first = max(0, visible - window) if window else 0
        kv = self.kv[sequence][first:visible].double()
        q = query[: self.heads * self.size].double().view(self.kv_heads, -1, self.size)
        weights = torch.einsum("kgd,tkd->kgt", q, kv[:, 0]).mul(self.scale).softmax(dim=2)
        return torch.einsum("kgt,tkd->kgd", weights, kv[:, 1]).flatten()

    def decode(self, body: Any, qkv: Tensor, window: int | None, rows: slice = slice(None)) -> Tensor:
        lengths = torch.tensor(self.lengths[rows], dtype=torch.int32)
        out = torch.full((len(lengths), self.heads * self.size), torch.nan, dtype=qkv.dtype)
        body.decode_attention(qkv[rows], out, self.cache, self.tables[rows], lengths, self.scale, window)
        return out


@cache
def problem(geometry: tuple[int, int, int], dtype: torch.dtype) -> tuple[Sequences, Tensor]:
    """Sequences that must not change, and a query for each."""
    sequences = Sequences(LENGTHS, geometry, dtype)
    return sequences, sequences.queries(len(LENGTHS))


@cache
def expected(geometry: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> Tensor:
    sequences, qkv = problem(geometry, dtype)
    return torch.stack(
        [sequences.dense(i, qkv[i], length, window) for i, length in enumerate(sequences.lengths)]
    )


def check_decode(body: Any, geometry: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    sequences, qkv = problem(geometry, dtype)
    result = sequences.decode(body, qkv, window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        result.double(), expected(geometry, dtype, window), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_reference_decode(geometry: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    check_decode(reference, geometry, dtype, window)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_compiled_decode(geometry: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    check_decode(compiled, geometry, dtype, window)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_compiled_row_is_bitwise_the_same_alone(
    geometry: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    sequences, qkv = problem(geometry, dtype)
    together = sequences.decode(compiled, qkv, window)
    for row in range(len(LENGTHS)):
        alone = sequences.decode(compiled, qkv, window, slice(row, row + 1))
        assert torch.equal(alone[0], together[row]), f"row {row}"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_stays_in_its_row(dtype: torch.dtype, where: str) -> None:
    sequences = Sequences(LENGTHS, (6, 2, 64), dtype)
    qkv = sequences.queries(len(LENGTHS))
    clean = sequences.decode(compiled, qkv, None)
    row, heads = 7, slice(0, 3 * 64)
    if where == "query":
        qkv[row, :192] = torch.nan
    else:
        block = int(sequences.tables[row, 2])
        sequences.cache[block, 5, ("key", "value").index(where), 0] = torch.nan
    result = sequences.decode(compiled, qkv, None)
    others = [i for i in range(len(LENGTHS)) if i != row]
    assert torch.equal(result[others], clean[others])
    assert result[row, heads].isnan().all()
    assert torch.equal(result[row, 192:], clean[row, 192:]), "the other KV head is untouched"


@pytest.mark.usefixtures("threads")
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    sequences = Sequences([300, 40], (4, 2, 64), dtype)
    qkv = sequences.queries(2) * 40
    result = sequences.decode(compiled, qkv, None)
    expected = torch.stack([sequences.dense(i, qkv[i], n, None) for i, n in enumerate([300, 40])])
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (17, 17), (64, 3), (100, 100), (129, 64), (300, 1)])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_prefill_equals_dense_attention(
    geometry: tuple[int, int, int], dtype: torch.dtype, length: int, chunk: int, window: int | None
) -> None:
    sequences = Sequences([50, length, 7], geometry, dtype)
    qkv = sequences.queries(chunk)
    out = torch.full((chunk, sequences.heads * sequences.size), torch.nan, dtype=dtype)
    prefill_attention(
        qkv, out, sequences.cache, one_chunk(chunk, length, sequences.tables[1]), sequences.scale, window
    )
    expected = [
        sequences.dense(1, qkv[i], length - chunk + 1 + i, window)
        for i in range(0, chunk, max(chunk // 5, 1))
    ]
    tolerance = TOLERANCES[dtype]
    picked = out[:: max(chunk // 5, 1)].double()
    torch.testing.assert_close(picked, torch.stack(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 20])
def test_a_prompts_bits_do_not_depend_on_where_it_is_cut(dtype: torch.dtype, window: int | None) -> None:
    """What lies behind the chunk in its last block is left from another sequence."""
    sequences = Sequences([150], (6, 2, 64), dtype)
    qkv, table = sequences.queries(150), sequences.tables[0]
    whole = torch.empty(150, 6 * 64, dtype=dtype)
    prefill_attention(qkv, whole, sequences.cache, one_chunk(150, 150, table), sequences.scale, window)
    for end in [*range(1, 36), 63, 64, 65, 80, 127, 150]:
        cache = sequences.cache.clone()
        block_size = cache.shape[1]
        if end % block_size:
            cache[int(table[end // block_size]), end % block_size :] = torch.nan
        for begin in {0, end - 1, end // 2, max(0, end - 17), end // 16 * 16 if end % 16 else 0}:
            out = torch.empty(end - begin, 6 * 64, dtype=dtype)
            chunk = one_chunk(end - begin, end, table)
            prefill_attention(qkv[begin:end], out, cache, chunk, sequences.scale, window)
            assert torch.equal(out, whole[begin:end]), (begin, end)


def test_several_chunks_at_once_leave_other_rows_alone(dtype: torch.dtype) -> None:
    """Of a sequence, of its cached prefix's end, and padding that has no rows."""
    sequences = Sequences([50, 100, 7], (6, 2, 64), dtype)
    qkv = sequences.queries(30)
    out = torch.full((30, 6 * 64), torch.nan, dtype=dtype)
    begins, ends, lengths, which = [2, 9, 12, 0], [9, 12, 29, 0], [7, 50, 100, 0], [2, 0, 1, 0]
    begins_, ends_, lengths_, tile_chunks, tile_begins = (
        torch.tensor(values, dtype=torch.int32)
        for values in (begins, ends, lengths, [0, 1, 2, -1], [2, 9, 12, 0])
    )
    chunks = PrefillChunks(begins_, ends_, lengths_, sequences.tables[which], tile_chunks, tile_begins)
    prefill_attention(qkv, out, sequences.cache, chunks, sequences.scale, None)
    for begin, end, length, sequence in zip(begins[:3], ends[:3], lengths[:3], which[:3], strict=True):
        alone = torch.full_like(out[begin:end], torch.nan)
        chunk = one_chunk(end - begin, length, sequences.tables[sequence])
        prefill_attention(qkv[begin:end], alone, sequences.cache, chunk, sequences.scale, None)
        assert torch.equal(out[begin:end], alone) and not alone.isnan().any()
    assert out[:2].isnan().all() and out[29:].isnan().all()


@pytest.mark.parametrize("body", [reference, compiled], ids=["reference", "compiled"])
@pytest.mark.usefixtures("threads")
def test_a_row_of_length_0_is_neither_read_nor_written(body: Any, dtype: torch.dtype) -> None:
    sequences = Sequences(LENGTHS, (6, 2, 64), dtype)
    qkv = sequences.queries(len(LENGTHS))
    expected = sequences.decode(body, qkv, None)
    empty = [0, 4, 5, len(LENGTHS) - 1]
    for row in empty:
        qkv[row], sequences.tables[row], sequences.lengths[row] = torch.nan, 2**31 - 1, 0
    out = torch.full_like(expected, 7.0)
    lengths = torch.tensor(sequences.lengths, dtype=torch.int32)
    body.decode_attention(qkv, out, sequences.cache, sequences.tables, lengths, sequences.scale, None)
    assert (out[empty] == 7.0).all()
    decodes = [row for row in range(len(LENGTHS)) if row not in empty]
    assert torch.equal(out[decodes], expected[decodes])
    body.decode_attention(qkv, out.zero_(), sequences.cache, sequences.tables, 0 * lengths, 1.0, None)
    assert not out.any()
