"""The product with a quantized weight as it is stored: the reference against the formula, with outputs full of NaN."""

import pytest
import torch

from loraplex.engine.kernels.quantized_linear import quantized_linear
from loraplex.engine.kernels.reference import quantized_linear as reference
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

ROWS = (1, 2, 3, 5, 16, 129)
SHAPES = ((48, 64), (33, 200), (1, 31), (96, 384))
"""[outputs, inputs]: whole tiles and groups, and neither."""


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


def test_bias_is_added_before_rounding() -> None:
    for name, weight in weights_of((33, 200)).items():
        x = rows_of(5, 200, torch.bfloat16)
        bias = (torch.arange(33) * 0.37 - 5).bfloat16()
        exact = x.double() @ dequantize(weight).double().t() + bias.double()
        size = x.double().norm(dim=1)[:, None] * dequantize(weight).double().norm(dim=1)
        out = poisoned(x, weight)
        assert quantized_linear(x, weight, out, bias) is out
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + size * 1e-5).all(), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [2, 16])
def test_a_row_that_is_not_finite_is_alone(rows: int, value: float) -> None:
    for name, weight in weights_of((96, 384)).items():
        x = rows_of(rows, 384, torch.bfloat16)
        clean = quantized_linear(x, weight)
        x[1, 5] = value
        result = quantized_linear(x, weight)
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(result[others], clean[others]), name
        # A weight of 0 does not make NaN out of every infinity's product alone, but the row as a whole is lost.
        assert not result[1].isfinite().all(), name


def test_rows_of_zeros_give_zeros() -> None:
    for weight in weights_of((96, 384)).values():
        for rows in (1, 16):
            x = torch.zeros(rows, 384, dtype=torch.bfloat16)
            assert (quantized_linear(x, weight) == 0).all()


def test_no_rows() -> None:
    for weight in weights_of((96, 384)).values():
        x = torch.zeros(0, 384, dtype=torch.bfloat16)
        assert quantized_linear(x, weight).shape == (0, 96)


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
    x = rows_of(7, 64, dtype)
    assert largest_error(quantized_linear(x, weight), x, weight) < (1e-6 if dtype is torch.float32 else 3e-3)
