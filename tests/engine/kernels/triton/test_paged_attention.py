"""The Triton kernels of paged attention.

They run interpreted on the CPU (a process of its own: the switch is read at import), compiled for sm_90 without a GPU, and
on CUDA where there is one. Every block outside the tables, every place after a length and all memory not yet written is
NaN; a table's entries after its row's blocks are invalid.
"""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from torch import Tensor

from loraplex.engine.kernels import paged_attention
from loraplex.engine.kernels.dispatch import KernelBackend
from loraplex.engine.kernels.prefill_chunks import PrefillChunks, one_chunk, tiles_of
from loraplex.engine.kernels.reference import paged_attention as reference
from loraplex.engine.kernels.reference.rotary import e4m3

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
decode = pytest.importorskip("loraplex.engine.kernels.triton.decode_attention")

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MAX_ERROR_OF_8_BITS = 0.06
"""Of attention over K and V in e4m3, whose values are off by 2^-4 at most and a fortieth on average, for the norm of a row."""
BLOCK_SIZE = 16
LENGTHS = [1, 16, 17, 100, 170, 300]
# heads, KV heads, head size
GEOMETRIES = [(2, 2, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (20, 1, 16)]
INTERPRETED_TYPES = [torch.float32, torch.float16]
DECODE_WINDOWS = [None, 1, 130]
SERVED_WINDOWS = [None, 600]
WINDOWS = [None, 130]
PREFILL_WINDOWS = [None, 20]
NAN_PLACES = ["query", "key", "value"]
EMPTY_ROWS = [[0], [3, 4], [0, 1, 3, 5], [*range(6)]]


@pytest.fixture
def body(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The dispatch as tensors on CUDA have it, with splits short enough for short rows: of 32 to 64 keys, then 2 to 4, 11 at a time."""
    from loraplex.engine.kernels.triton import attention_tile

    monkeypatch.setattr(paged_attention, "backend_for", lambda _: KernelBackend.TRITON)
    monkeypatch.setattr(decode, "SPLIT_TOKENS", 32)
    monkeypatch.setattr(decode, "FEW_SPLITS", 2)
    monkeypatch.setattr(decode, "LONG_SPLIT_TOKENS", 64)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    monkeypatch.setattr(decode, "MERGE_VALUES", 512)
    monkeypatch.setattr(decode, "MAX_PROGRAMS", 11)
    monkeypatch.setattr(attention_tile, "MAX_TILE_TOKENS", 32)
    return paged_attention


class Sequences:
    """Random K and V of ragged sequences, scattered over a cache that is NaN elsewhere."""

    def __init__(
        self, lengths: list[int], geometry: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.heads, self.kv_heads, self.size = geometry
        self.scale = self.size**-0.5
        self.generator = torch.Generator().manual_seed(sum(geometry))
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = torch.randperm(sum(counts) + 3, generator=self.generator)[: sum(counts)]
        shape = (sum(counts) + 3, BLOCK_SIZE, 2, self.kv_heads, self.size)
        cache = torch.full(shape, torch.nan)
        tables = torch.full((len(lengths), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
        for row, (length, table) in enumerate(zip(lengths, torch.split(blocks, counts), strict=True)):
            places = (table.unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
            kv = torch.randn((length, 2, self.kv_heads, self.size), generator=self.generator)
            cache.view(-1, 2, self.kv_heads, self.size)[places] = kv
            tables[row, : len(table)] = table
        self.cache, self.tables, self.dtype = cache.to(device, dtype), tables.to(device), dtype
        self.kv_scales = (1.0, 1.0)

    def quantize(self, kv_scales: tuple[float, float]) -> None:
        """The same K and V in 8 bits."""
        self.cache, self.kv_scales = e4m3(self.cache, kv_scales), kv_scales

    def queries(self, rows: int) -> Tensor:
        """[rows, (heads + 2 kv_heads) * size]; what follows the queries holds NaN."""
        columns = (self.heads + 2 * self.kv_heads) * self.size
        qkv = torch.full((rows, columns), torch.nan)
        width = self.heads * self.size
        qkv[:, :width] = 2 * torch.randn((rows, width), generator=self.generator)
        return qkv.to(self.cache.device, self.dtype)

    def out(self, rows: int) -> Tensor:
        """Poisoned, and every second row of its memory: the others must stay NaN."""
        shape = 2 * rows, self.heads * self.size
        memory = torch.full(shape, torch.nan, dtype=self.dtype, device=self.cache.device)
        return memory[::2]

    def decode(self, body: Any, qkv: Tensor, window: int | None) -> Tensor:
        out = self.out(len(self.lengths))
        body.decode_attention(
            qkv, out, self.cache, self.tables, self.lengths, self.scale, window, self.kv_scales
        )
        assert out._base is not None and out._base[1::2].isnan().all()
        return out

    def decode_alone(self, body: Any, qkv: Tensor, window: int | None, row: int) -> Tensor:
        """One row with a table of its own width, as in a batch without other rows."""
        length, out = self.lengths[row : row + 1], self.out(1)
        tables = self.tables[row : row + 1, : -(-int(length) // BLOCK_SIZE)].contiguous()
        body.decode_attention(qkv[row : row + 1], out, self.cache, tables, length, self.scale, window)
        return out[0]

    def prefill(self, body: Any, qkv: Tensor, row: int, length: int, window: int | None) -> Tensor:
        """All rows of `qkv` as the last of `length` tokens of a sequence."""
        return self.prefill_chunks(body, qkv, one_chunk(qkv.shape[0], length, self.tables[row]), window)

    def prefill_chunks(
        self, body: Any, qkv: Tensor, chunks: PrefillChunks, window: int | None = None
    ) -> Tensor:
        out = self.out(qkv.shape[0])
        body.prefill_attention(qkv, out, self.cache, chunks, self.scale, window, self.kv_scales)
        assert out._base is not None and out._base[1::2].isnan().all()
        return out

    def chunks(self, shapes: list[tuple[int, int, int]], first: int, padding: int = 0) -> PrefillChunks:
        """(sequence, rows, length) of chunks, the first at row `first`; `padding` chunks and tiles behind them."""
        begins = [first + sum(rows for _, rows, _ in shapes[:chunk]) for chunk in range(len(shapes))]
        ends = [begin + rows for begin, (_, rows, _) in zip(begins, shapes, strict=True)]
        tile_chunks, tile_begins = tiles_of(begins, ends)
        none = [0] * padding
        lengths = [length for *_, length in shapes]
        columns = (begins + none, ends + none, lengths + none, [-1] * padding + tile_chunks)
        begins_, ends_, lengths_, tile_chunks_ = (column(values, self.tables.device) for values in columns)
        tables = self.tables[[sequence for sequence, *_ in shapes]]
        tables = torch.cat([tables, torch.full_like(tables[:1], 2**31 - 1).expand(padding, -1)])
        # Padding may lie between the tiles as well as behind them, and name any row.
        tile_begins_ = column([first + 1] * padding + tile_begins, self.tables.device)
        return PrefillChunks(begins_, ends_, lengths_, tables, tile_chunks_, tile_begins_)


def column(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(result: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", DECODE_WINDOWS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_decode_equals_the_reference(
    geometry: tuple[int, int, int],
    window: int | None,
    kernel_dtype: torch.dtype,
    device: torch.device,
    body: Any,
    spread: Any,
) -> None:
    spread((GEOMETRIES, geometry), (INTERPRETED_TYPES, kernel_dtype), (DECODE_WINDOWS, window))
    sequences = Sequences(LENGTHS, geometry, kernel_dtype, device)
    qkv = sequences.queries(len(LENGTHS))
    check(sequences.decode(body, qkv, window), sequences.decode(reference, qkv, window))


@pytest.mark.parametrize("window", SERVED_WINDOWS)
def test_decode_with_splits_as_served(
    window: int | None, kernel_dtype: torch.dtype, device: torch.device, spread: Any
) -> None:
    spread((INTERPRETED_TYPES, kernel_dtype), (SERVED_WINDOWS, window))
    sequences = Sequences([128, 129, 1, 1100], (3, 1, 64), kernel_dtype, device)
    qkv = sequences.queries(4)
    result = sequences.decode(decode, qkv, window)
    check(result, sequences.decode(reference, qkv, window))


@pytest.mark.parametrize("window", WINDOWS)
def test_decode_is_bitwise_the_same_alone(
    window: int | None, kernel_dtype: torch.dtype, device: torch.device, body: Any, spread: Any
) -> None:
    spread((INTERPRETED_TYPES, kernel_dtype), (WINDOWS, window))
    sequences = Sequences(LENGTHS, (6, 2, 64), kernel_dtype, device)
    qkv = sequences.queries(len(LENGTHS))
    together = sequences.decode(body, qkv, window)
    for row in range(len(LENGTHS)):
        assert torch.equal(sequences.decode_alone(body, qkv, window, row), together[row]), f"row {row}"


def test_any_number_of_programs_gives_the_same_bits(
    device: torch.device, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = Sequences([100, 1, 70], (4, 2, 32), torch.float32, device)
    qkv = sequences.queries(3)
    expected = sequences.decode(body, qkv, None)
    for programs in (1, 1000, *[1000] * (200 if device.type == "cuda" else 1)):
        monkeypatch.setattr(decode, "MAX_PROGRAMS", programs)
        assert torch.equal(sequences.decode(body, qkv, None), expected), programs
        assert not decode._arrivals(8, sequences.lengths.device).any(), "the next launch counts from 0"


def test_merges_see_every_split(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Whichever program ends last, and however often: fresh partial sums are NaN, so one that is read too early shows."""
    if device.type == "cuda":
        # As served: 1,024 programs at once.
        body, lengths, dtype, launches = paged_attention, [4096, 1500] * 32, torch.bfloat16, 200
    else:
        body, lengths, dtype, launches = request.getfixturevalue("body"), LENGTHS, torch.float32, 2
    sequences = Sequences(lengths, (8, 2, 64), dtype, device)
    qkv = sequences.queries(len(lengths))
    first = sequences.decode(body, qkv, None)
    check(first, sequences.decode(reference, qkv, None))
    for _ in range(launches):
        assert torch.equal(sequences.decode(body, qkv, None), first)
    assert not decode._arrivals(triton.next_power_of_2(2 * len(lengths)), sequences.lengths.device).any()


def test_a_narrow_view_of_wide_tables(device: torch.device, body: Any) -> None:
    sequences = Sequences([30, 17, 1], (6, 2, 64), torch.float32, device)
    qkv = sequences.queries(3)
    expected = sequences.decode(reference, qkv, None)
    wide = torch.full((3, 40), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, :2] = sequences.tables[:, :2]
    sequences.tables = wide[:, :2]
    check(sequences.decode(body, qkv, None), expected)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("empty", EMPTY_ROWS, ids=str)
def test_a_row_of_length_0_is_neither_read_nor_written(
    empty: list[int],
    window: int | None,
    kernel_dtype: torch.dtype,
    device: torch.device,
    body: Any,
    spread: Any,
) -> None:
    """Nor by a merge of its splits, of which there are none: partial sums that nothing wrote are NaN."""
    spread((EMPTY_ROWS, empty), (INTERPRETED_TYPES, kernel_dtype), (WINDOWS, window))
    sequences = Sequences(LENGTHS, (6, 2, 64), kernel_dtype, device)
    qkv = sequences.queries(len(LENGTHS))
    expected = sequences.decode(body, qkv, window)
    qkv[empty], sequences.tables[empty], sequences.lengths[empty] = torch.nan, 2**31 - 1, 0
    out = torch.full_like(expected, 7.0)
    operands = qkv, out, sequences.cache, sequences.tables, sequences.lengths, sequences.scale, window
    body.decode_attention(*operands)
    decodes = [row for row in range(len(LENGTHS)) if row not in empty]
    assert (out[empty] == 7.0).all()
    assert torch.equal(out[decodes], expected[decodes])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("geometry", [(9, 3, 64), (8, 1, 128)], ids=str)
def test_a_cache_of_8_bits(
    geometry: tuple[int, int, int],
    window: int | None,
    kernel_dtype: torch.dtype,
    device: torch.device,
    body: Any,
) -> None:
    if kernel_dtype is torch.float32 and window is not None:
        pytest.skip("the same path")
    sequences = Sequences([1, 17, 170], geometry, kernel_dtype, device)
    qkv, prompt = sequences.queries(3), sequences.queries(20)
    exact = sequences.decode(reference, qkv, window), sequences.prefill(reference, prompt, 2, 70, window)
    sequences.quantize((0.5, 1.5))
    expected = sequences.decode(reference, qkv, window), sequences.prefill(reference, prompt, 2, 70, window)
    results = sequences.decode(body, qkv, window), sequences.prefill(body, prompt, 2, 70, window)
    for result, same, unquantized in zip(results, expected, exact, strict=True):
        # Queries and probabilities are rounded to fp16, which the reference leaves as they are.
        tolerance = max(TOLERANCES[kernel_dtype], TOLERANCES[torch.float16])
        torch.testing.assert_close(result, same, atol=2 * tolerance, rtol=2 * tolerance)
        error = (result - unquantized).double().norm() / unquantized.double().norm()
        assert 0.005 < error < MAX_ERROR_OF_8_BITS


def test_nan_in_a_cache_of_8_bits(device: torch.device, body: Any) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter takes NaN of 8 bits for 480")
    sequences = Sequences(LENGTHS, (6, 2, 64), torch.bfloat16, device)
    sequences.quantize((1.0, 1.0))
    qkv = sequences.queries(len(LENGTHS))
    bits = sequences.cache.view(torch.uint8)
    bits[int(sequences.tables[3, 5]), 5, 0, 0] = 0x7F
    result = sequences.decode(body, qkv, None)
    assert result[3, :192].isnan().all()
    assert result.isnan().sum() == 192


def test_decode_asks_for_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory: whatever reads a value raises."""
    launched: list[tuple[tuple[int, ...], int]] = []
    kernel = MagicMock()
    kernel.__getitem__.side_effect = lambda grid: lambda *args, **_: launched.append((grid, args[5].numel()))
    monkeypatch.setattr(decode, "decode_kernel", kernel)
    cache = torch.empty(512, 16, 2, 8, 128, dtype=torch.float8_e4m3fn, device="meta")
    qkv, out = (torch.empty(64, n, dtype=torch.bfloat16, device="meta") for n in (6144, 4096))
    tables = torch.empty(64, 512, dtype=torch.int32, device="meta")
    lengths = torch.empty(64, dtype=torch.int32, device="meta")
    for columns in (512, 9, 8):
        decode.decode_attention(qkv, out, cache, tables[:, :columns], lengths, 1.0, None)
    sums = 64 * 32 * 128
    assert launched == [((1056,), 16 * sums), ((1024,), 2 * sums), ((512,), 0)]


@triton.jit  # type: ignore[untyped-decorator]
def splits_kernel(  # type: ignore[no-untyped-def]
    out,
    count,
    split: tl.constexpr,  # type: ignore[name-defined]
    few: tl.constexpr,  # type: ignore[name-defined]
    long: tl.constexpr,  # type: ignore[name-defined]
    most: tl.constexpr,  # type: ignore[name-defined]
) -> None:
    """Tokens of a split and number of splits of each length below `count`, without a window."""
    length = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    _, tokens, splits = decode.splits_of(length, 0, 32, split, few, long, most)
    tl.store(out + length, tokens)
    tl.store(out + count + length, splits)


def test_no_length_has_more_splits_than_its_bound(device: torch.device) -> None:
    """Every length of a window of 65,536, and its splits as served: whole tiles that cover it and overlap nowhere."""
    count = 1 << 16
    out = torch.zeros(2, count, dtype=torch.int32, device=device)
    policy = (decode.SPLIT_TOKENS, decode.FEW_SPLITS, decode.LONG_SPLIT_TOKENS, decode.MAX_SPLITS)
    splits_kernel[count // 1024,](out, count, *policy)
    tokens, splits = out.tolist()
    bounds = [decode.most_splits(length, None) for length in range(count)]
    assert bounds == sorted(bounds) and splits[0] == 0
    for length in range(1, count):
        assert tokens[length] % 32 == 0 and tokens[length] >= 128
        assert (splits[length] - 1) * tokens[length] < length <= splits[length] * tokens[length]
        assert splits[length] <= bounds[length] <= 32
    assert [splits[n] for n in (128, 129, 512, 1024, 4096, 8192, 65535)] == [1, 2, 4, 8, 8, 16, 32]


@pytest.mark.parametrize("where", NAN_PLACES)
def test_nan_stays_in_its_row_and_heads(
    where: str, kernel_dtype: torch.dtype, device: torch.device, body: Any, spread: Any
) -> None:
    spread((NAN_PLACES, where), (INTERPRETED_TYPES, kernel_dtype))
    sequences = Sequences(LENGTHS, (6, 2, 64), kernel_dtype, device)
    qkv = sequences.queries(len(LENGTHS))
    clean = sequences.decode(body, qkv, None)
    row = 3
    if where == "query":
        qkv[row, :192] = torch.nan
    else:
        sequences.cache[int(sequences.tables[row, 5]), 5, ("key", "value").index(where), 0] = torch.nan
    result = sequences.decode(body, qkv, None)
    others = [i for i in range(len(LENGTHS)) if i != row]
    assert torch.equal(result[others], clean[others])
    assert result[row, :192].isnan().all()
    assert torch.equal(result[row, 192:], clean[row, 192:]), "the other KV head is untouched"


def test_large_scores_neither_overflow_nor_vanish(
    kernel_dtype: torch.dtype, device: torch.device, body: Any
) -> None:
    sequences = Sequences([150, 40], (4, 2, 64), kernel_dtype, device)
    qkv = sequences.queries(2) * 40
    result, expected = sequences.decode(body, qkv, None), sequences.decode(reference, qkv, None)
    torch.testing.assert_close(result, expected, atol=4 * TOLERANCES[kernel_dtype], rtol=1e-2)


# Sequence, rows, length: a lone token, a whole prompt, one that ends in a second tile, ends of cached prefixes (the first
# begins within a block, the second at a block), and the same sequence again, as after its preemption in a longer chunk.
CHUNKS = [(0, 1, 1), (1, 17, 17), (2, 33, 70), (3, 3, 50), (3, 2, 34), (2, 70, 70)]


@pytest.mark.parametrize("window", PREFILL_WINDOWS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_prefill_equals_the_reference(
    geometry: tuple[int, int, int],
    window: int | None,
    kernel_dtype: torch.dtype,
    device: torch.device,
    body: Any,
    spread: Any,
) -> None:
    """Chunks of several sequences in one launch, between rows that belong to none."""
    spread((GEOMETRIES, geometry), (INTERPRETED_TYPES, kernel_dtype), (PREFILL_WINDOWS, window))
    sequences = Sequences([1, 17, 70, 50], geometry, kernel_dtype, device)
    rows = sum(rows for _, rows, _ in CHUNKS)
    qkv = sequences.queries(rows + 5)
    qkv[:3] = qkv[-2:] = torch.nan
    result = sequences.prefill_chunks(body, qkv, sequences.chunks(CHUNKS, 3, padding=2), window)
    expected = sequences.prefill_chunks(reference, qkv, sequences.chunks(CHUNKS, 3), window)
    check(result[3:-2], expected[3:-2])
    assert result[:3].isnan().all() and result[-2:].isnan().all(), "rows of no chunk are not written"


def test_a_step_of_padding_alone_writes_nothing(device: torch.device, body: Any) -> None:
    """As a captured step whose graph was made for more chunks than none."""
    sequences = Sequences([20], (6, 2, 64), torch.float32, device)
    result = sequences.prefill_chunks(body, sequences.queries(8), sequences.chunks([(0, 0, 0)], 0, padding=3))
    assert result.isnan().all()


@pytest.mark.parametrize("window", PREFILL_WINDOWS)
def test_prefill_is_bitwise_the_same_in_other_chunks(
    window: int | None, kernel_dtype: torch.dtype, device: torch.device, body: Any, spread: Any
) -> None:
    """In one chunk, in several, and beside chunks of other sequences."""
    spread((INTERPRETED_TYPES, kernel_dtype), (PREFILL_WINDOWS, window))
    sequences = Sequences([70, 40], (6, 2, 64), kernel_dtype, device)
    qkv = sequences.queries(70)
    whole = sequences.prefill(body, qkv, 0, 70, window)
    cuts = [0, 1, 37, 64, 70]
    parts = [sequences.prefill(body, qkv[begin:end], 0, end, window) for begin, end in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)
    beside = sequences.chunks([(1, 40, 40), *((0, b - a, b) for a, b in pairwise(cuts)), (1, 5, 9)], 0, 1)
    rows = torch.cat([sequences.queries(40), qkv, sequences.queries(5)])
    assert torch.equal(sequences.prefill_chunks(body, rows, beside, window)[40:110], whole)


def test_blocks_far_into_a_large_pool(kernel_dtype: torch.dtype, device: torch.device, body: Any) -> None:
    sequences = Sequences([100, 33], (4, 1, 128), kernel_dtype, device)
    qkv, prompt = sequences.queries(2), sequences.queries(20)
    expected = sequences.decode(reference, qkv, None), sequences.prefill(reference, prompt, 0, 100, None)
    near = sequences.cache
    # On the GPU more values than 32 bits count.
    far = (600_000 if device.type == "cuda" else 600) - len(near)
    sequences.cache = near.new_empty((far + len(near), *near.shape[1:]))
    sequences.cache[far:] = near
    sequences.tables = torch.where(sequences.tables < len(near), sequences.tables + far, sequences.tables)
    check(sequences.decode(body, qkv, None), expected[0])
    check(sequences.prefill(body, prompt, 0, 100, None), expected[1])


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=40)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) >= (99 if request.config.getoption("--long") else 48)


COMPILE = r"""
import re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loraplex.engine.kernels.prefill_chunks import PREFILL_TILE
from loraplex.engine.kernels.triton import attention_tile as tile
from loraplex.engine.kernels.triton import decode_attention as decode
from loraplex.engine.kernels.triton import prefill_attention as prefill

# An entry's dtype is the cache's; a model with a cache of 8 bits computes in bf16.
SIZES = {"bf16": (64, 128, 256), "fp8e4nv": (64, 128)}
BYTES = {"fp8e4nv": 1}
POINTERS = {
    **dict.fromkeys(("tables", "lengths", "ends", "tile_chunks", "tile_begins", "arrivals"), "*i32"),
    **dict.fromkeys(("partials", "weights"), "*fp32"), **dict.fromkeys(("scale", "value_scale"), "fp32"),
}
ALIGNED = ("query_stride", "out_stride", "block_stride", "token_stride")

def compiled(kernel, dtype, size, group, window):
    stages = {decode.decode_kernel: decode.DECODE_STAGES, prefill.prefill_kernel: prefill.PREFILL_STAGES}
    constants = dict(
        group=group, window=window, block_size=16, size=size, block_d=tile.padded(size),
        block_m=prefill.prefill_rows(size) if kernel is prefill.prefill_kernel else decode.DECODE_ROWS,
        block_n=tile.tile_tokens(size, BYTES.get(dtype, 2)), block_rows=decode.MIN_ROWS,
        split_tokens=decode.SPLIT_TOKENS, few_splits=decode.FEW_SPLITS, long_tokens=decode.LONG_SPLIT_TOKENS,
        max_splits=decode.MAX_SPLITS, tile_rows=PREFILL_TILE, block_h=4, block_s=decode.MERGE_VALUES // (4 * size),
    )
    model = "*bf16" if dtype == "fp8e4nv" else "*" + dtype
    held = {"qkv": model, "out": model, "kv_cache": "*" + dtype}
    signature = {
        name: "constexpr" if name in constants else (held | POINTERS).get(name, "i32") for name in kernel.arg_names
    }
    hinted = [i for i, (n, kind) in enumerate(signature.items()) if kind.startswith("*") or n in ALIGNED]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(i,): constants[n] for i, n in enumerate(kernel.arg_names) if n in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i in hinted},
    )
    options = {"num_warps": tile.NUM_WARPS, "num_stages": stages[kernel], "enable_fp_fusion": True}
    if kernel is decode.decode_kernel:
        options["maxnreg"] = decode.max_registers(size, BYTES.get(dtype, 2))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), constants["block_n"]

def instructions_of_loop(file):
    # Of the longest innermost loop that multiplies matrices, and how many of them are spills.
    text = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", file], capture_output=True, text=True, check=True)
    labels, lines, loops = {}, [], []
    for line in text.stdout.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels and any("HMMA" in one for one in lines[labels[back[1]]:]):
                loops.append((labels[back[1]], len(lines)))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return end - begin, sum("LDL" in line or "STL" in line for line in lines[begin:end])

for dtype, sizes in SIZES.items():
    for size in sizes:
        for kernel in (decode.decode_kernel, prefill.prefill_kernel):
            group, window = (3, 4096) if size == 64 else (4, 0)
            binary, tokens = compiled(kernel, dtype, size, group, window)
            with open(sys.argv[1], "wb") as file:
                file.write(binary.asm["cubin"])
            tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", sys.argv[1]]
            usage = subprocess.run(tool, capture_output=True, text=True, check=True)
            resources = next(line for line in usage.stdout.splitlines() if "STACK:" in line)
            wide = "cp.async.cg.shared.global" in binary.asm["ptx"]
            indirect = re.search(
                r"(%[\w.]+) = tt.load [^\n]*tensor<\d+x!tt.ptr<i32>>[^\n]*\n\s*"
                r"%[\w.]+ = arith.extsi \1 : tensor<\d+xi32> to tensor<\d+xi64>",
                binary.asm["ttir"],
            )
            held = re.search(r"memdesc<(\d+)x%dx%dx" % (tokens, tile.padded(size)), binary.asm["ttgir"])
            count, spilled = instructions_of_loop(sys.argv[1])
            instructions = count * 32 * tile.NUM_WARPS / (2 * tokens * size)
            print(
                kernel.__name__, dtype, size, binary.metadata.shared, wide, "mma.sync" in binary.asm["ptx"],
                indirect is not None, held[1] if held else 0, instructions, spilled, resources,
            )
"""


@pytest.mark.long
@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
def test_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "kernel.cubin")],
        check=False,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ".src"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    variants = done.stdout.splitlines()
    assert len(variants) == 10
    for variant in variants:
        kernel, dtype, _, shared, wide, tensor_cores, indirect, held, instructions, spilled = variant.split()[
            :10
        ]
        assert int(shared) <= MAX_SHARED_BYTES, variant
        # A few values may wait outside the loop for its end, where that leaves room for another program.
        stack = re.search(r"\bSTACK:(\d+)\b", variant)
        assert stack and int(stack[1]) <= 32 and re.search(r"\bLOCAL:0\b", variant), variant
        assert spilled == "0", variant
        assert wide == "True", f"loads are not of 16 bytes: {variant}"
        assert indirect == "True", f"block numbers are not of 64 bits: {variant}"
        assert int(held) == (3 if kernel == "decode_kernel" else 2), f"tiles in flight: {variant}"
        assert tensor_cores == "True", variant
        if kernel == "decode_kernel":
            # 15.6 for every bf16 value, 7.8 for one of 8 bits is what the SMs of an H200 issue while its memory delivers one.
            assert 0 < float(instructions) <= (7 if dtype == "fp8e4nv" else 8), variant
