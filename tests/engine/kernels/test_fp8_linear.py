"""Rows rounded to fp8, and torch's scaled product of them.

The rounding is interpreted (in a process of its own, with fp32 for the stored type: the interpreter's fp8 is not the
hardware's). The product runs on torch's CPU implementation. Both run on CUDA where there is one.
"""

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.quantization.quantized_weight import LARGEST_FP8, dequantize, quantize_fp8, quantize_int8

pytest.importorskip("triton")

WIDTHS = (16, 31, 640, 20000)
"""The last one takes more than one block."""


def rows_of(rows: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs))
    return (x * torch.logspace(-3, 2, rows)[:, None]).to(device, dtype)


def formula(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30)
    return x.float() * (LARGEST_FP8 / largest), largest / LARGEST_FP8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", WIDTHS)
def test_rows_over_their_scale(inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    from loraplex.engine.kernels.fp8_linear import round_rows

    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    x = rows_of(3, inputs, dtype, device)
    x[1] = 0
    values, scales = round_rows(x, torch.float32)
    wanted, wanted_scales = formula(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(values, wanted, rtol=1e-6, atol=0)
    assert (values[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", WIDTHS)
def test_rounds_as_torch_does(inputs: int, device: torch.device) -> None:
    from loraplex.engine.kernels.fp8_linear import round_rows

    x = rows_of(33, inputs, torch.bfloat16, device)
    rounded, _ = round_rows(x)
    wanted = formula(x)[0].clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    # Quotients that are a rounding error apart may fall on two sides of a middle.
    assert (rounded.view(torch.uint8) != wanted.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_alone(value: float, device: torch.device) -> None:
    from loraplex.engine.kernels.fp8_linear import round_rows

    x = rows_of(3, 640, torch.float16, device)
    clean = round_rows(x, torch.float32)
    x[1, 5] = value
    values, scales = round_rows(x, torch.float32)
    for row in (0, 2):
        assert torch.equal(values[row], clean[0][row]) and scales[row] == clean[1][row]
    assert values[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_product_is_of_the_rounded_rows(rows: int, dtype: torch.dtype) -> None:
    """The scaled product with CUDA's arguments, on torch's CPU implementation."""
    from loraplex.engine.kernels.fp8_linear import multiply, serves

    generator = torch.Generator().manual_seed(rows)
    weight = quantize_fp8(torch.randn(48, 96, generator=generator))
    x, bias = rows_of(rows, 96, dtype, torch.device("cpu")), torch.randn(48, generator=generator).to(dtype)
    assert serves(x, weight)
    values, scales = formula(x)
    rounded = values.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    wanted = (rounded.double() * scales.double()) @ dequantize(weight).double().t()
    size = x.double().norm(dim=1)[:, None] * dequantize(weight).double().norm(dim=1)
    for added in (None, bias):
        out = torch.full((rows, 48), torch.nan, dtype=dtype)
        multiply(rounded, scales, weight, out, added)
        exact = wanted if added is None else wanted + added.double()
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-7 + size * 1e-3).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 300])
def test_product_on_cuda(rows: int, device: torch.device) -> None:
    from loraplex.engine.kernels.quantized_linear import quantized_linear

    weight = quantize_fp8(torch.randn(512, 640, generator=torch.Generator().manual_seed(1)).to(device))
    x = rows_of(rows, 640, torch.bfloat16, device)
    bias = torch.randn(512, device=device).bfloat16()
    out = torch.full((rows, 512), torch.nan, dtype=x.dtype, device=device)
    quantized_linear(x, weight, out, bias)
    exact = x.double() @ dequantize(weight).double().t() + bias.double()
    size = x.double().norm(dim=1)[:, None] * dequantize(weight).double().norm(dim=1)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + size * 0.02).all()


def test_serves_what_the_scaled_product_takes() -> None:
    from loraplex.engine.kernels.fp8_linear import serves

    x = torch.empty(1, 1, dtype=torch.bfloat16)
    assert serves(x, quantize_fp8(torch.ones(16, 32)))
    assert not serves(x.float(), quantize_fp8(torch.ones(16, 32)))
    assert not serves(x, quantize_fp8(torch.ones(16, 31)))
    assert not serves(x, quantize_fp8(torch.ones(17, 32)))
    assert not serves(x, quantize_int8(torch.ones(16, 32)))


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=8)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 17
