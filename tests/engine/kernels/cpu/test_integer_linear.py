"""The CPU's integer product against exact sums of the integers it says it makes, on awkward shapes, to the bit where it promises so."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from loraplex.engine.kernels.cpu import integer_linear as module
from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.kernels.cpu.integer_linear import integer_linear
from loraplex.engine.kernels.cpu.integer_weight import lay_out
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    dequantize,
    quantize_int4,
    quantize_int8,
)

pytestmark = pytest.mark.skipif(not numba_bridge.is_available(), reason="this CPU has no compiled body")

GROUP = 32
SHAPES = ((48, 64), (33, 200), (1, 31), (96, 384), (720, 96))
"""[outputs, inputs]: whole tiles and groups, neither, and enough for two threads."""
ROWS = (1, 2, 3, 7, 8, 15, 33)


def weights_of(shape: tuple[int, int]) -> dict[str, QuantizedWeight]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) / shape[1] ** 0.5
    return {
        "int8": quantize_int8(weight),
        "int8/64": quantize_int8(weight, 64),
        "int4/128": quantize_int4(weight, 128),
        "int4/32": quantize_int4(weight, 32),
        "int4/32 zeros": quantize_int4(weight, 32, symmetric=False),
        "int4/64 zeros": quantize_int4(weight, 64, symmetric=False),
    }


def rows_of(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    # Outliers, as activations have them: what one scale per row would lose everything else to.
    return (x * torch.where(torch.rand(rows, inputs, generator=generator) < 0.02, 100.0, 1.0)).to(dtype)


def exact_product(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """float64, of rows rounded to int8 in groups of 32, one scale each."""
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    # A number divided by a tensor would be its reciprocal times the number.
    inverses = torch.full_like(largest, 127).div_(largest.clamp(min=2.0**-100))
    integers = (groups * inverses).round()
    assert integers.abs().max() <= 127
    rounded = (integers.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]
    product: torch.Tensor = rounded @ dequantize(weight).double().t()
    return product if bias is None else product + bias.double()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is allocated is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("by_instruction", [None, False], ids=["this CPU's", "any CPU's"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_the_integers(shape: tuple[int, int], by_instruction: bool | None) -> None:
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(3)).bfloat16()
    for name, weight in weights_of(shape).items():
        laid_out = lay_out(weight, bias)
        for rows in ROWS:
            x = rows_of(rows, shape[1])
            result = integer_linear(x, laid_out, by_instruction)
            assert (result.shape, result.dtype) == ((rows, shape[0]), torch.bfloat16)
            expected = exact_product(x, weight, bias)
            # y is rounded once to bfloat16; float sums of the groups lose far less, relative to what they are made of.
            made_of = x.double().abs() @ dequantize(weight).double().abs().t() + bias.double().abs()
            allowed = 2.0**-8 * expected.abs() + 2.0**-20 * made_of
            assert ((result.double() - expected).abs() <= allowed).all(), (name, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_cpu_computes_the_same_bits(shape: tuple[int, int]) -> None:
    for name, weight in weights_of(shape).items():
        laid_out, x = lay_out(weight, None), rows_of(15, shape[1])
        assert torch.equal(integer_linear(x, laid_out), integer_linear(x, laid_out, False)), name


def test_a_row_is_bitwise_the_same_alone_and_in_a_batch(threads: int) -> None:
    for shape in ((33, 200), (720, 96), (96, 384)):
        for name, weight in weights_of(shape).items():
            laid_out, x = lay_out(weight, None), rows_of(33, shape[1])
            together = integer_linear(x, laid_out)
            for count in (1, 2, 3, 5, 8, 16):
                for begin in range(0, 33 - count, count):
                    rows = slice(begin, begin + count)
                    assert torch.equal(integer_linear(x[rows], laid_out), together[rows]), (name, count)


def test_engines_on_several_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long products run without the GIL, so that two of them are in their buffers at once."""
    monkeypatch.setattr(module, "LONG_PRODUCT", 0)
    weight = lay_out(weights_of((96, 384))["int8"], None)
    batches = [rows_of(rows, 384) for rows in (3, 40)]
    wanted = [integer_linear(x, weight) for x in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            results = pool.map(lambda x: integer_linear(x, weight), batches)
            assert all(torch.equal(result, one) for result, one in zip(results, wanted, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_lost_alone(value: float) -> None:
    for name, weight in weights_of((96, 384)).items():
        for rows in (2, 16):
            laid_out, x = lay_out(weight, None), rows_of(rows, 384)
            clean = integer_linear(x, laid_out)
            x[1, 5] = value
            result = integer_linear(x, laid_out)
            others = [row for row in range(rows) if row != 1]
            assert torch.equal(result[others], clean[others]), name
            assert not result[1].isfinite().any(), name


def test_float16_is_rounded_to_float16() -> None:
    weight = quantize_int8(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))
    x = rows_of(7, 64, torch.float16)
    result = integer_linear(x, lay_out(weight, None))
    assert result.dtype is torch.float16
    expected = exact_product(x, weight, None)
    assert (
        (result.double() - expected).abs() <= 2.0**-11 * expected.abs() + 1e-4 * expected.abs().max()
    ).all()


def test_zeros_and_what_is_too_small_to_invert_are_zeros() -> None:
    for weight in weights_of((96, 384)).values():
        laid_out = lay_out(weight, None)
        for value in (0.0, -0.0, 1e-39, 1e-35):
            assert (integer_linear(torch.full((9, 384), value).bfloat16(), laid_out) == 0).all()


def test_the_largest_integers_do_not_overflow() -> None:
    weight = quantize_int8(torch.full((16, 4096), -1.0))
    result = integer_linear(torch.full((3, 4096), 2.0).bfloat16(), lay_out(weight, None))
    torch.testing.assert_close(result, torch.full_like(result, -8192.0), rtol=2.0**-8, atol=0)


def test_no_rows() -> None:
    for weight in weights_of((33, 200)).values():
        assert integer_linear(torch.zeros(0, 200).bfloat16(), lay_out(weight, None)).shape == (0, 33)


def test_what_does_not_fit_is_refused() -> None:
    laid_out = lay_out(quantize_int8(torch.ones(4, 8)), None)
    for x in (torch.ones(2, 7).bfloat16(), torch.ones(2, 8)):
        with pytest.raises(ValueError, match="rows of 8 16-bit floats"):
            integer_linear(x, laid_out)
