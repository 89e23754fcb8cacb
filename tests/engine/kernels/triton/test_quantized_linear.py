"""The Triton kernels of quantized products: interpreted on the CPU (a process of its own: the switch is read at import),
compiled for sm_90 without a GPU, and on CUDA where there is one.
"""

import re
from dataclasses import replace

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.kernels.triton.quantized_linear_tiles import (
    FLOAT32_TILE,
    SKINNY_TILES,
    WIDE_TILES,
    Tile,
    splits_for,
    tile_for,
)
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    WeightFormat,
    dequantize,
    quantize_int4,
    quantize_int8,
)

pytest.importorskip("triton")

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""
ROWS = (1, 2, 5, 16, 64, 129)
SHAPES = ((48, 640), (33, 200), (1, 31))
"""[outputs, inputs]: more tiles than one turn takes, tiles cut off on both sides, less than one tile."""
FORMATS = (
    "int8",
    "int8/128",
    "int8/32",
    "int4/128",
    "int4/64",
    "int4/32",
    "int4/128 zeros",
    "int4/64 zeros",
    "int4/32 zeros",
)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative to |x| |w|: y's rounding, and at prefill that of the scaled weights."""


def weight_of(name: str, shape: tuple[int, int], device: torch.device) -> QuantizedWeight:
    """A weight whose memory is followed by what must not be read as part of it."""
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) / shape[1] ** 0.5
    bits, _, group_size = name.removesuffix(" zeros").partition("/")
    if bits == "int8":
        weight = quantize_int8(dense, int(group_size) if group_size else None)
    else:
        weight = quantize_int4(dense, int(group_size), symmetric=not name.endswith("zeros"))
    return replace(
        weight,
        packed=guarded(weight.packed, 0x77, device),
        scales=guarded(weight.scales, torch.nan, device),
        zeros=None if weight.zeros is None else guarded(weight.zeros, 0xFF, device),
    )


def guarded(tensor: torch.Tensor, poison: float, device: torch.device) -> torch.Tensor:
    memory = torch.full((tensor.numel() + 4096,), poison, dtype=tensor.dtype, device=device)
    memory[: tensor.numel()] = tensor.flatten()
    return memory[: tensor.numel()].view(tensor.shape)


def rows_of(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return guarded(x, torch.nan, device)


def check(out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, rounding: float | None = None) -> None:
    dense = dequantize(weight).double()
    error = (out.double() - x.double() @ dense.t()).abs()
    size = x.double().norm(dim=1)[:, None] * dense.norm(dim=1)
    assert (error <= size * (rounding or ROUNDING[x.dtype])).all(), f"{(error / size).max()}"


def product(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The result, after a look at the rows before and behind it, which must stay as they were."""
    from loraplex.engine.kernels.triton.quantized_linear import quantized_linear

    memory = torch.full((x.shape[0] + 2, weight.outputs), torch.nan, dtype=x.dtype, device=x.device)
    quantized_linear(x, weight, memory[1:-1])
    assert memory[0].isnan().all() and memory[-1].isnan().all()
    return memory[1:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_formula(
    name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, every_combination: bool
) -> None:
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    if dtype is torch.float32 and shape == SHAPES[0] and device.type == "cpu":
        pytest.skip("float32 has small tiles, whose many programs the interpreter takes one by one")
    weight = weight_of(name, shape, device)
    # Each format has every number of rows, and each shape, but not all three together.
    turn = (FORMATS.index(name) + SHAPES.index(shape)) % 2
    for rows in ROWS if every_combination else ROWS[turn::2]:
        x = rows_of(rows, shape[1], dtype, device)
        check(product(x, weight), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_every_tile_computes_the_same(name: str, device: torch.device) -> None:
    from loraplex.engine.kernels.triton.quantized_linear import launch

    weight = weight_of(name, (70, 640), device)
    x = rows_of(40, 640, torch.float16, device)
    for tile in (*SKINNY_TILES[weight.bits], *WIDE_TILES):
        out = torch.full((40, 70), torch.nan, dtype=x.dtype, device=device)
        launch(x, weight, out, tile)
        check(out, x, weight)


@pytest.mark.parametrize("name", ["int8", "int4/32 zeros"])
def test_split_sums_are_whole_again(name: str, device: torch.device) -> None:
    """Twice, since a product must leave the counters as it found them; with more splits than there are tiles of K, too."""
    from loraplex.engine.kernels.triton.quantized_linear import launch

    weight = weight_of(name, (40, 600), device)
    x = rows_of(20, 600, torch.float16, device)
    bias = guarded(torch.linspace(-3, 3, 40).half(), torch.nan, device)
    for tile in (Tile(16, 32, 2, 4, 2), Tile(64, 64, 1, 4, 4)):
        results = []
        for splits in (3, 3, 99):
            out = torch.full((20, 40), torch.nan, dtype=x.dtype, device=device)
            launch(x, weight, out, tile, bias, splits)
            check((out.double() - bias.double()).to(torch.float32), x, weight, rounding=4e-3)
            results.append(out)
        assert torch.equal(results[0], results[1])


def test_merges_see_every_split(device: torch.device) -> None:
    """Whichever program ends last, and however often: fresh partial sums are NaN, so one that is read too early shows."""
    from loraplex.engine.kernels.triton.quantized_linear import _counters, launch

    shape, splits, launches = ((4096, 4096), 4, 200) if device.type == "cuda" else ((40, 600), 3, 2)
    weight = weight_of("int4/128 zeros", shape, device)
    x = rows_of(64, shape[1], torch.float16, device)
    results = [torch.full((64, shape[0]), torch.nan, dtype=x.dtype, device=device) for _ in range(launches)]
    for out in results:
        launch(x, weight, out, tile_for(x, weight), splits=splits)
    check(results[0], x, weight, rounding=4e-3)
    assert all(torch.equal(out, results[0]) for out in results)
    assert not _counters(x.device).any()


@pytest.mark.parametrize("rows", [5, 40])
def test_bias_is_added(rows: int, device: torch.device) -> None:
    from loraplex.engine.kernels.triton.quantized_linear import quantized_linear

    weight = weight_of("int8", (33, 200), device)
    x = rows_of(rows, 200, torch.float16, device)
    bias = guarded(torch.linspace(-3, 3, 33).half(), torch.nan, device)
    out = torch.full((rows, 33), torch.nan, dtype=x.dtype, device=device)
    quantized_linear(x, weight, out, bias)
    check((out.double() - bias.double()).to(torch.float32), x, weight, rounding=4e-3)


def tile_of(rows: int, outputs: int, dtype: torch.dtype = torch.bfloat16, bits: int = 4) -> Tile:
    weight = quantize_int4(torch.ones(1, 32), 32) if bits == 4 else quantize_int8(torch.ones(1, 32))
    return tile_for(torch.empty(rows, 32, dtype=dtype), replace(weight, shape=(outputs, 32)))


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_follow_rows_and_outputs(bits: int) -> None:
    few, many, more_rows = SKINNY_TILES[bits]
    wide, wider = WIDE_TILES
    assert tile_of(1, 4096, bits=bits) == tile_of(16, 4096, bits=bits) == few
    assert tile_of(1, 33792, bits=bits) == tile_of(16, 33792, bits=bits) == many
    assert tile_of(17, 4096, bits=bits) == tile_of(32, 28672, bits=bits) == more_rows
    assert tile_of(33, 4096, bits=bits) == tile_of(64, 28672, bits=bits) == wide
    assert tile_of(65, 4096, bits=bits) == tile_of(512, 4096, bits=bits) == wide
    assert tile_of(65, 28672, bits=bits) == tile_of(640, 4096, bits=bits) == wider
    assert tile_of(65, 4096, torch.float32, bits) == FLOAT32_TILE


def test_splits_follow_the_weights_shape() -> None:
    def splits_of(rows: int, outputs: int, inputs: int) -> int:
        weight = replace(quantize_int4(torch.ones(1, 32), 32), shape=(outputs, inputs))
        return splits_for(rows, weight, tile_of(rows, outputs))

    assert splits_of(1, 4096, 4096) == splits_of(16, 4096, 14336) == 1
    assert splits_of(1, 2560, 9728) == splits_of(16, 2560, 9728) == 3
    assert splits_of(1, 2560, 1024) == 1
    assert splits_of(64, 4096, 4096) == 4
    assert splits_of(64, 28672, 4096) == 1
    assert splits_of(1, 28672, 4096) == splits_of(1, 128256, 4096) == 1
    assert splits_of(128, 4096, 4096) == 1


def test_every_integer_is_exact(device: torch.device) -> None:
    """x picks single weights, so that nothing can hide in a sum: every byte there is, in every place of a tile."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    x = torch.eye(128, dtype=dtype, device=device)
    bytes_of = torch.arange(256).to(torch.uint8)
    int8 = QuantizedWeight(
        format=WeightFormat.INT8,
        packed=bytes_of.view(torch.int8)[:, None].repeat(1, 128).to(device),
        scales=torch.ones(1, 256, dtype=torch.bfloat16, device=device),
        zeros=None,
        group_size=128,
        shape=(256, 128),
    )
    int4 = replace(int8, format=WeightFormat.INT4, packed=bytes_of[None, :, None].repeat(1, 1, 64).to(device))
    for weight in (int8, int4):
        for first in range(0, 128, 16):
            few = product(x[first : first + 16], weight)
            assert torch.equal(few.float(), dequantize(weight).t()[first : first + 16])
        assert torch.equal(product(x, weight).float(), dequantize(weight).t())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_assembly_equals_arithmetic(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.engine.kernels.triton import quantized_linear as module

    if device.type == "cpu":
        pytest.skip("the interpreter knows no assembly")
    weight = weight_of(name, (48, 640), device)
    for rows in ROWS:
        x = rows_of(rows, 640, torch.bfloat16, device)
        with_assembly = product(x, weight)
        monkeypatch.setattr(module, "ASSEMBLY", False)
        assert torch.equal(product(x, weight), with_assembly)
        monkeypatch.undo()


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_row(name: str, device: torch.device, every_combination: bool) -> None:
    weight = weight_of(name, (33, 200), device)
    turn = FORMATS.index(name) % 2
    for rows in (5, 64) if every_combination else (5, 64)[turn::2]:
        x = rows_of(rows, 200, torch.float16, device)
        clean = product(x, weight)
        x[3, 100] = torch.nan
        result = product(x, weight)
        others = [row for row in range(rows) if row != 3]
        assert torch.equal(result[others], clean[others])
        assert result[3].isnan().all()


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=25)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 74


@pytest.mark.parametrize("source", ["_NIBBLES_TO_BF16", "_BYTES_ABOVE_2_23"])
def test_assembly_is_what_it_says(source: str) -> None:
    """PTX of four kinds, executed here: for every byte in every place."""
    from loraplex.engine.kernels.triton import unpacking as module

    text: str = getattr(module, source).value
    lines = [
        re.findall(r"[$\w.]+", line) for line in text.splitlines() if re.match(r"\s+(shr|xor|and|prmt)", line)
    ]
    assert len(lines) in (5, 9)
    for byte in range(256):
        given = [byte, byte ^ 0x5A, 255 - byte, byte * 7 & 255]
        registers = {"$4": int.from_bytes(bytes(given), "little")}

        def value(operand: str, known: dict[str, int] = registers) -> int:
            return known[operand] if operand in known else int(operand, 0)

        for operation, target, *operands in lines:
            a, b, *selector = map(value, operands)
            if selector:
                pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
                chosen = bytes(pool[selector[0] >> 4 * i & 15] for i in range(4))
                registers[target] = int.from_bytes(chosen, "little")
            else:
                registers[target] = {"shr": a >> b, "xor": a ^ b, "and": a & b}[operation.partition(".")[0]]
        words = torch.tensor([registers[f"${i}"] for i in range(4)]).to(torch.uint32)
        if source == "_NIBBLES_TO_BF16":
            wanted = [128 + (b & 15) for b in given] + [128 + (b >> 4) for b in given]
            assert words.view(torch.bfloat16).tolist() == wanted
        else:
            signed = torch.tensor(given, dtype=torch.uint8).view(torch.int8).tolist()
            assert words.view(torch.float32).tolist() == [2**23 + 128 + b for b in signed]
