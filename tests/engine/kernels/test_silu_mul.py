"""SiLU times up: both backends against the definition, extremes included."""

import pytest
import torch
from torch import Tensor

from loraplex.engine.kernels.cpu import silu_mul as compiled
from loraplex.engine.kernels.reference import silu_mul as reference

SHAPES = [(1, 48), (5, 37), (129, 96), (40, 1536)]
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def operand(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Gates from -12 to 12 and beyond at both ends."""
    generator = torch.Generator().manual_seed(shape[1])
    values = torch.randn((shape[0], 2 * shape[1]), generator=generator) * 4
    values[:, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, 500.0, -500.0])
    return values.to(dtype)


def check(result: Tensor, gate_up: Tensor) -> None:
    gate, up = gate_up.double().chunk(2, dim=1)
    tolerance = TOLERANCES[gate_up.dtype]
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = operand(shape, dtype)
    check(reference.silu_mul(gate_up), gate_up)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = operand(shape, dtype)
    check(compiled.silu_mul(gate_up), gate_up)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("column", [3, 40])
def test_nan_reaches_its_own_element_only(dtype: torch.dtype, column: int) -> None:
    gate_up = operand((6, 32), dtype)
    clean = compiled.silu_mul(gate_up)
    gate_up[2, column] = torch.nan
    result = compiled.silu_mul(gate_up)
    expected = torch.zeros_like(result, dtype=torch.bool)
    expected[2, column % 32] = True
    assert torch.equal(result.isnan(), expected)
    assert torch.equal(result[~expected], clean[~expected])
