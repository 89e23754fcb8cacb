"""The product with a quantized weight: every CPU body against a loop over the formula, with outputs full of NaN."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from loraplex.engine.kernels.compiled import machine
from loraplex.engine.kernels.quantized_linear import (
    LONGEST_INTEGER_SUM,
    quantized_linear,
    with_cpu_layout,
)
from loraplex.engine.kernels.reference import quantized_linear as reference
from loraplex.engine.quantization.weight import (
    QuantizedWeight,
    WeightLayout,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

ROWS = (1, 2, 3, 5, 16, 129)
SHAPES = ((48, 64), (33, 200), (1, 31), (96, 384))
"""[outputs, inputs]: whole tiles and groups, and neither."""
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
"""What a body may lose, relative to |x| |w|: y's rounding, since the rows keep more than their dtype has."""

needs_body = pytest.mark.skipif(not machine.is_available(), reason="this CPU has no compiled body")


def weights_of(shape: tuple[int, int]) -> dict[str, QuantizedWeight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) / shape[1] ** 0.5
    return {
        "int8": quantize_int8(weight),
        "int8/64": quantize_int8(weight, 64),
        "int4/128": quantize_int4(weight, 128),
        "int4/64": quantize_int4(weight, 64),
        "int4/32": quantize_int4(weight, 32),
        "int4/32 zeros": quantize_int4(weight, 32, symmetric=False),
    }


def rows_of(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
    return (x * torch.logspace(-2, 2, rows)[:, None]).to(dtype)


def poisoned(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return torch.full((x.shape[0], weight.outputs), torch.nan, dtype=x.dtype)


def largest_error(result: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight) -> float:
    """Against float64, relative to what the row's sums are made of: |x| |w|."""
    dense = dequantize(weight).double()
    error = (result.double() - x.double() @ dense.t()).abs()
    return float((error / (x.double().norm(dim=1)[:, None] * dense.norm(dim=1)).clamp(min=1e-30)).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_reference_is_the_formula(rows: int, shape: tuple[int, int]) -> None:
    for name, weight in weights_of(shape).items():
        x = rows_of(rows, shape[1], torch.float32)
        out = poisoned(x, weight)
        reference.quantized_linear(x, weight, out)
        assert largest_error(out, x, weight) < 1e-6, name


def body_of(name: str, dtype: torch.dtype, weight: QuantizedWeight) -> QuantizedWeight | None:
    """The weight for the compiled body; None where there would be one more body to compile and nothing new to see."""
    if dtype is torch.float16 and name != "int8":
        return None
    if dtype is torch.float32:
        if name not in ("int8", "int4/32 zeros"):
            return None
        weight = replace(weight, scales=weight.scales.float())
    return with_cpu_layout(weight)


@needs_body
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_body_loses_no_more_than_its_dtype(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name, plain in weights_of(shape).items():
        weight = body_of(name, dtype, plain)
        if weight is None:
            continue
        assert weight.layout is WeightLayout.LINES
        for rows in ROWS:
            x = rows_of(rows, shape[1], dtype)
            out = poisoned(x, weight)
            assert quantized_linear(x, weight, out) is out
            assert largest_error(out, x, weight) < ROUNDING[dtype], (name, rows)


def test_threads_share_the_outputs(threads: int) -> None:
    for shape in ((1, 31), (80, 48), (176, 48)):
        weight = with_cpu_layout(weights_of(shape)["int8"])
        for rows in (1, 6):
            x = rows_of(rows, shape[1], torch.bfloat16)
            out = quantized_linear(x, weight, poisoned(x, weight))
            assert largest_error(out, x, weight) < ROUNDING[x.dtype]


@needs_body
def test_a_cpu_without_byte_products_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.engine.kernels.compiled import quantized_linear as compiled

    weight = with_cpu_layout(weights_of((33, 200))["int8"])
    for rows in (1, 7):
        x = rows_of(rows, 200, torch.bfloat16)
        with_instruction = quantized_linear(x, weight)
        monkeypatch.setattr(compiled, "has_byte_products", lambda: False)
        assert torch.equal(quantized_linear(x, weight), with_instruction)
        monkeypatch.undo()


@needs_body
def test_engines_on_several_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long products run without the GIL, so that two of them are in their buffers at once."""
    from loraplex.engine.kernels.compiled import quantized_linear as compiled

    monkeypatch.setattr(compiled, "LONG_PRODUCT", 0)
    weight = with_cpu_layout(weights_of((96, 384))["int8"])
    batches = [rows_of(rows, 384, torch.bfloat16) for rows in (3, 40)]
    wanted = [quantized_linear(x, weight) for x in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            for result, expected in zip(
                pool.map(lambda x: quantized_linear(x, weight), batches), wanted, strict=True
            ):
                assert torch.equal(result, expected)


@needs_body
def test_largest_integers_are_summed_exactly() -> None:
    """Every weight and every value at its limit, so that any sum that saturates or wraps shows."""
    inputs = 4096
    x = torch.ones(3, inputs, dtype=torch.bfloat16) * torch.tensor([[1.0], [-1.0], [3.0]]).bfloat16()
    for plain in (quantize_int8(torch.ones(16, inputs)), quantize_int4(torch.ones(16, inputs), 128)):
        weight = with_cpu_layout(plain)
        wanted = x.double() @ dequantize(weight).double().t()
        assert torch.equal(quantized_linear(x, weight), wanted.bfloat16())


@needs_body
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    """Bit for bit, at every row count: alone and in every place of a tile."""
    for name, plain in weights_of((96, 384)).items():
        weight = body_of(name, dtype, plain)
        if weight is None:
            continue
        x = rows_of(23, 384, dtype)
        together = quantized_linear(x, weight)
        for first in range(23):
            assert torch.equal(quantized_linear(x[first : first + 1], weight)[0], together[first]), name
        for count in range(2, 13):
            assert torch.equal(quantized_linear(x[5 : 5 + count], weight), together[5 : 5 + count]), name


@needs_body
def test_a_row_that_outgrows_the_others_keeps_their_precision_apart() -> None:
    """Values far below a row's largest one are rounded by it; a neighbour's largest one does nothing to them."""
    weight = with_cpu_layout(quantize_int8(torch.eye(64)))
    x = torch.full((2, 64), 2.0**-9, dtype=torch.bfloat16)
    x[0, 0] = 1e4
    y = quantized_linear(x, weight).float()
    assert y[0, 0] == x[0, 0] and (y[0, 1:] == 0).all()
    torch.testing.assert_close(y[1], x[1].float(), rtol=2**-8, atol=0)


def test_bias_is_added_before_rounding() -> None:
    for name, plain in weights_of((33, 200)).items():
        for weight in (plain, with_cpu_layout(plain)):
            x = rows_of(5, 200, torch.bfloat16)
            bias = (torch.arange(33) * 0.37 - 5).bfloat16()
            exact = x.double() @ dequantize(weight).double().t() + bias.double()
            size = x.double().norm(dim=1)[:, None] * dequantize(weight).double().norm(dim=1)
            error = (quantized_linear(x, weight, bias=bias).double() - exact).abs()
            assert (error <= exact.abs() * 2**-8 + size * 1e-4).all(), name


@needs_body
def test_the_other_layout_is_instead_of_the_plain_one() -> None:
    for name, plain in weights_of((96, 384)).items():
        weight = with_cpu_layout(plain)
        assert with_cpu_layout(weight) is weight
        assert weight.num_bytes == plain.num_bytes, name
        assert torch.equal(dequantize(weight), dequantize(plain)), name


def test_a_sum_too_long_for_32_bits_stays_the_reference() -> None:
    plain = quantize_int8(torch.ones(1, LONGEST_INTEGER_SUM + 1))
    assert with_cpu_layout(plain) is plain


def test_plain_weights_and_other_dtypes_are_the_reference() -> None:
    for name, plain in weights_of((48, 64)).items():
        for weight, dtype in ((plain, torch.bfloat16), (with_cpu_layout(plain), torch.float64)):
            x = rows_of(16, 64, dtype)
            wanted = poisoned(x, weight)
            reference.quantized_linear(x, weight, wanted)
            assert torch.equal(quantized_linear(x, weight), wanted), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [2, 16])
def test_a_row_that_is_not_finite_is_alone(rows: int, value: float) -> None:
    for name, plain in weights_of((96, 384)).items():
        weight = with_cpu_layout(plain)
        x = rows_of(rows, 384, torch.bfloat16)
        clean = quantized_linear(x, weight)
        x[1, 5] = value
        result = quantized_linear(x, weight)
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(result[others], clean[others]), name
        # A weight of 0 does not make NaN out of every infinity's product alone, but the row as a whole is lost.
        assert not result[1].isfinite().all(), name


def test_rows_of_zeros_give_zeros() -> None:
    for plain in weights_of((96, 384)).values():
        for rows in (1, 16):
            x = torch.zeros(rows, 384, dtype=torch.bfloat16)
            assert (quantized_linear(x, with_cpu_layout(plain)) == 0).all()


def test_no_rows() -> None:
    for plain in weights_of((96, 384)).values():
        x = torch.zeros(0, 384, dtype=torch.bfloat16)
        assert quantized_linear(x, with_cpu_layout(plain)).shape == (0, 96)


def test_what_does_not_fit_is_refused() -> None:
    weight = quantize_int8(torch.ones(4, 8))
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="inputs"):
        quantized_linear(torch.ones(2, 7), weight)
    for out in (torch.ones(2, 5), torch.ones(2, 4, dtype=torch.float16), torch.ones(4, 2).t()):
        with pytest.raises(ValueError, match="out must be"):
            quantized_linear(x, weight, out)
    for bias in (torch.ones(5), torch.ones(1, 4), torch.ones(4, dtype=torch.float16)):
        with pytest.raises(ValueError, match="bias must be"):
            quantized_linear(x, weight, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_is_the_references_on_a_cpu(dtype: torch.dtype) -> None:
    weight = quantize_fp8(torch.randn(48, 64, generator=torch.Generator().manual_seed(5)))
    assert with_cpu_layout(weight) is weight
    x = rows_of(7, 64, dtype)
    assert largest_error(quantized_linear(x, weight), x, weight) < (1e-6 if dtype is torch.float32 else 3e-3)
