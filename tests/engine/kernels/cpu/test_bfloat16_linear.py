"""The CPU's bfloat16 product against float64, on awkward shapes, and what it promises to the bit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraplex.engine.kernels.cpu import bfloat16_linear as module
from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.kernels.cpu.bfloat16_linear import BFloat16Weight, bfloat16_linear, lay_out
from loraplex.engine.kernels.cpu.llvm_vectors import has_bfloat16_products

pytestmark = pytest.mark.skipif(not numba_bridge.is_available(), reason="this CPU has no compiled body")

SHAPES = ((64, 64), (33, 201), (1, 1), (31, 7), (720, 96), (96, 1536))
"""[outputs, inputs]: whole tiles and steps, neither, and enough for several threads."""
MANY_ROWS = (64, 65, 131)


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).bfloat16()


def rows_of(rows: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.logspace(-2, 2, rows)[:, None]
    return torch.randn(rows, inputs, generator=generator).mul_(scales).bfloat16()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is allocated is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, result: torch.Tensor) -> None:
    assert (result.shape, result.dtype) == ((len(x), len(weight)), torch.bfloat16)
    expected, made_of = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        expected, made_of = expected + bias.double(), made_of + bias.double().abs()
    # y is rounded once to bfloat16; float sums lose far less, relative to what they are made of.
    assert ((result.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-18 * made_of).all()


@pytest.mark.parametrize("by_instruction", [None, False], ids=["this CPU's", "any CPU's"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_the_products(shape: tuple[int, int], by_instruction: bool | None) -> None:
    weight = weight_of(shape)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(3)).bfloat16()
    for added in (None, bias, bias.float()):
        laid_out = lay_out(weight, added)
        for rows in (*range(21), *MANY_ROWS):
            x = rows_of(rows, shape[1])
            check(x, weight, added, bfloat16_linear(x, laid_out, by_instruction))


@pytest.mark.skipif(not has_bfloat16_products(), reason="this CPU has one way alone")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_cpu_computes_the_same_bits(shape: tuple[int, int]) -> None:
    laid_out, x = lay_out(weight_of(shape), None), rows_of(131, shape[1])
    assert torch.equal(bfloat16_linear(x, laid_out, True), bfloat16_linear(x, laid_out, False))


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(threads: int) -> None:
    for shape in ((33, 201), (720, 96), (96, 1536)):
        laid_out, x = lay_out(weight_of(shape), None), rows_of(131, shape[1])
        together = bfloat16_linear(x, laid_out)
        for count in (1, 2, 3, 4, 5, 8, 16, 65):
            for begin in range(0, 131 - count, count):
                rows = slice(begin, begin + count)
                assert torch.equal(bfloat16_linear(x[rows], laid_out), together[rows]), (shape, count)


def test_engines_on_several_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long products run without the GIL, so that two of them run at once."""
    monkeypatch.setattr(module, "LONG_PRODUCT", 0)
    weight = lay_out(weight_of((96, 1536)), None)
    batches = [rows_of(rows, 1536) for rows in (3, 40)]
    wanted = [bfloat16_linear(x, weight) for x in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            results = pool.map(lambda x: bfloat16_linear(x, weight), batches)
            assert all(torch.equal(result, one) for result, one in zip(results, wanted, strict=True))


@pytest.mark.parametrize("by_instruction", [None, False], ids=["this CPU's", "any CPU's"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_lost_alone(value: float, by_instruction: bool | None) -> None:
    laid_out = lay_out(weight_of((96, 1536)), None)
    for rows in (2, 4, 16):
        x = rows_of(rows, 1536)
        clean = bfloat16_linear(x, laid_out, by_instruction)
        x[1, 5] = value
        result = bfloat16_linear(x, laid_out, by_instruction)
        others = [row for row in range(rows) if row != 1]
        assert torch.equal(result[others], clean[others])
        assert not result[1].isfinite().any()


def test_a_weight_that_is_not_finite_loses_its_output_alone() -> None:
    weight = weight_of((96, 201))
    x = rows_of(5, 201)
    clean = bfloat16_linear(x, lay_out(weight, None))
    weight[40, 200] = torch.nan
    result = bfloat16_linear(x, lay_out(weight, None))
    assert result[:, 40].isnan().all()
    others = [output for output in range(96) if output != 40]
    assert torch.equal(result[:, others], clean[:, others])


def test_a_weight_of_any_strides_is_laid_out() -> None:
    weight, x = weight_of((64, 96)), rows_of(3, 64)
    for strided in (weight.t(), weight.new_zeros(96, 200).copy_(weight.t().repeat(1, 4)[:, :200])[:, 5:69]):
        assert not strided.is_contiguous()
        plain = lay_out(strided.contiguous(), None)
        assert torch.equal(bfloat16_linear(x, lay_out(strided, None)), bfloat16_linear(x, plain))


def test_what_does_not_fit_is_refused() -> None:
    laid_out: BFloat16Weight = lay_out(torch.ones(4, 8).bfloat16(), None)
    wrong = (
        torch.ones(2, 7).bfloat16(),
        torch.ones(2, 8),
        torch.ones(2, 8).half(),
        torch.ones(8, 2).bfloat16().t(),
    )
    for x in wrong:
        with pytest.raises(ValueError, match="rows of 8 bfloat16"):
            bfloat16_linear(x, laid_out)
