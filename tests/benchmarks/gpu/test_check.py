"""A check sees what averages hide: one wrong element, one that was never written, one NaN."""

from collections.abc import Callable

import pytest
import torch
from tests.benchmarks.gpu.check import CheckResult, check
from tests.benchmarks.kernels.problem import Operands, Problem, TensorSource, widened
from torch import Tensor

CPU = torch.device("cpu")
SHAPE = (64, 128)


def doubling(spoil: Callable[[Tensor], None]) -> Problem:
    """out = 2 x, after which something happens to `out`."""

    def make(tensors: TensorSource) -> Operands:
        x = tensors.normal(*SHAPE, dtype=torch.bfloat16)
        out = torch.empty_like(x)

        def run() -> tuple[Tensor, ...]:
            before = out.clone()
            torch.mul(x, 2, out=out)
            spoil(out)
            kept = torch.zeros(SHAPE, dtype=torch.bool)
            kept[5, 7] = spoil is leave
            out.copy_(torch.where(kept, before, out))
            return (out,)

        return Operands(run, lambda: (widened(x) * 2,), poisoned=(out,))

    return Problem("double", "any", {}, "bfloat16", 1, 1, make)


def nothing(_: Tensor) -> None:
    return


def leave(_: Tensor) -> None:
    return


def one_wrong(out: Tensor) -> None:
    out[3, 3] = 9.0


def one_nan(out: Tensor) -> None:
    out[3, 3] = torch.nan


def test_a_right_kernel_passes() -> None:
    verdict = check(doubling(nothing), CPU, seed=1)
    assert verdict.ok and verdict.rel_err == 0 and verdict.nan == verdict.unwritten == 0


@pytest.mark.parametrize(("spoil", "nan", "unwritten"), [(one_wrong, 0, 0), (one_nan, 1, 0), (leave, 0, 1)])
def test_one_element_is_enough(spoil: Callable[[Tensor], None], nan: int, unwritten: int) -> None:
    verdict = check(doubling(spoil), CPU, seed=1)
    assert not verdict.ok
    assert (verdict.nan, verdict.unwritten) == (nan, unwritten)


def test_infinities_must_stand_where_they_are_expected() -> None:
    expected = torch.tensor([1.0, -torch.inf, 3.0])
    right, wrong = CheckResult(), CheckResult()
    right.add(expected.to(torch.bfloat16), expected)
    wrong.add(torch.tensor([1.0, 2.0, 3.0]).to(torch.bfloat16), expected)
    assert right.ok and not wrong.ok
