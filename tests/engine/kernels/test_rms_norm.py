"""RMSNorm: the torch backend against float64, the compiled one against the torch backend."""

from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.kernels.cpu import rms_norm as compiled
from loraplex.engine.kernels.reference import rms_norm as reference

SHAPES = [(1, 64), (3, 37), (129, 96), (17, 2048)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILON = 1e-5


def operands(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, residual, torch.randn(shape[1], generator=generator).to(dtype)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_the_definition(
    shape: tuple[int, int], dtype: torch.dtype, with_residual: bool
) -> None:
    x, residual, weight = operands(shape, dtype)
    summed = (x + residual if with_residual else x).double()
    expected = summed / (summed.pow(2).mean(1, keepdim=True) + EPSILON).sqrt() * weight.double()
    result = reference.rms_norm(x, residual if with_residual else None, weight, EPSILON)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, with_residual: bool
) -> None:
    x, residual, weight = operands(shape, dtype)
    before, ours, theirs = x.clone(), residual.clone(), residual.clone()
    result = compiled.rms_norm(x, ours if with_residual else None, weight, EPSILON)
    expected = reference.rms_norm(x, theirs if with_residual else None, weight, EPSILON)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours, theirs), "the residual is added and rounded alike"
    assert torch.equal(x, before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_know_nothing_of_each_other(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual, weight = operands(shape, dtype)
    together = compiled.rms_norm(x, residual.clone(), weight, EPSILON)
    alone = [
        compiled.rms_norm(x[i : i + 1], residual[i : i + 1].clone(), weight, EPSILON) for i in range(shape[0])
    ]
    assert torch.equal(torch.cat(alone), together)
    x[0, 5] = torch.nan
    with_nan = compiled.rms_norm(x, residual.clone(), weight, EPSILON)
    assert with_nan[0].isnan().all()
    assert torch.equal(with_nan[1:], together[1:])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-8])
def test_epsilon_decides_for_rows_of_tiny_values(epsilon: float) -> None:
    x = torch.full((2, 64), 1e-4)
    x[1] = 0.0
    result = compiled.rms_norm(x, None, torch.ones(64), epsilon)
    torch.testing.assert_close(result, reference.rms_norm(x, None, torch.ones(64), epsilon))


def test_two_engines_may_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not numba_bridge.is_available():
        pytest.skip("this CPU has no compiled body")
    x, weight = torch.randn(4, 64), torch.ones(64)
    expected, launch, inner = compiled.rms_norm(x, None, weight, 1e-6), numba_bridge._launch, list[int]()

    def interrupted(*arguments: Any) -> None:
        if not inner:
            inner.append(1)
            compiled.rms_norm(torch.randn(7, 32), None, torch.ones(32), 1e-6)
        launch(*arguments)

    monkeypatch.setattr(numba_bridge, "_launch", interrupted)
    assert torch.equal(compiled.rms_norm(x, None, weight, 1e-6), expected)
