"""Rounding that compensates its errors: better than to the nearest where inputs vary together, and the same elsewhere."""

import pytest
import torch

from loraplex.engine.quantization.gptq import quantize_gptq
from loraplex.engine.quantization.quantized_weight import dequantize, quantize_int4


def correlated_rows(inputs: int, rows: int = 512) -> torch.Tensor:
    """Rows [rows, inputs] that lie near a space of a quarter of the dimensions."""
    generator = torch.Generator().manual_seed(inputs)
    directions = torch.randn(inputs // 4, inputs, generator=generator)
    mixed = torch.randn(rows, inputs // 4, generator=generator) @ directions
    return mixed + 0.1 * torch.randn(rows, inputs, generator=generator)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("inputs", "group_size"), [(64, 32), (192, 64), (320, 128), (96, 64)])
def test_outputs_are_closer_than_by_rounding_to_nearest(
    inputs: int, group_size: int, symmetric: bool
) -> None:
    weight = torch.randn(48, inputs, generator=torch.Generator().manual_seed(1))
    x = correlated_rows(inputs)
    fitted = quantize_gptq(weight, x.t() @ x, group_size, symmetric=symmetric)
    nearest = quantize_int4(weight, group_size, symmetric=symmetric)
    errors = [(x @ (dequantize(q) - weight).t()).norm() for q in (fitted, nearest)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("symmetric", [True, False])
def test_inputs_that_never_vary_together_are_rounded_to_nearest(symmetric: bool) -> None:
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(2))
    fitted = quantize_gptq(weight, torch.eye(128), 64, symmetric=symmetric)
    assert torch.equal(dequantize(fitted), dequantize(quantize_int4(weight, 64, symmetric=symmetric)))


def test_an_input_that_is_always_zero_does_no_harm() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    x = correlated_rows(64)
    x[:, 5] = 0
    fitted = quantize_gptq(weight, x.t() @ x, 32, symmetric=True)
    assert dequantize(fitted).isfinite().all()


def test_values_that_are_not_finite_are_refused() -> None:
    moments = torch.eye(64)
    moments[3, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize_gptq(torch.ones(8, 64), moments, 64, symmetric=True)
