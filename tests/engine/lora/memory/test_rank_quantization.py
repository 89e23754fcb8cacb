"""8-bit rank rows: their values are near the adapter, the error is known exactly, and a large error is refused."""

import pytest
import torch

from loraplex.engine.errors import AdapterInexact
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.memory.rank_quantization import quantize_module, relative_error
from loraplex.engine.lora.weights import LoraModule, LoraWeights

INT8, FP8 = torch.int8, torch.float8_e4m3fn


def module(rank: int = 8, inputs: int = 96, outputs: int = 64, seed: int = 1) -> LoraModule:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn((rank, inputs), generator=generator)
    return LoraModule(a, 0.02 * torch.randn((outputs, rank), generator=generator))


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_scales_meet_between_shrink_and_expand(dtype: torch.dtype) -> None:
    quantized = quantize_module(module(), dtype)
    assert quantized.a.dtype is quantized.b.dtype is dtype and quantized.scales.shape == (8,)
    x = torch.randn(5, 96)
    by_kernel = ((x @ quantized.a.float().t()) * quantized.scales) @ quantized.b.float()
    plain = quantized.dequantized(torch.float32)
    torch.testing.assert_close(by_kernel, x @ plain.a.t() @ plain.b.t(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "least", "most"), [(INT8, 0.005, 0.02), (FP8, 0.02, 0.05)])
def test_the_reported_error_is_that_of_the_whole_delta(dtype: torch.dtype, least: float, most: float) -> None:
    original = module(rank=20, inputs=300, outputs=200)
    quantized = quantize_module(original, dtype)
    stands_for = quantized.dequantized(torch.float64)
    delta = original.b.double() @ original.a.double()
    change = (stands_for.b @ stands_for.a - delta).norm() / delta.norm()
    assert quantized.error == pytest.approx(float(change), rel=1e-3)
    assert least < quantized.error < most


def test_the_greatest_value_of_a_row_is_exact() -> None:
    original = module()
    stands_for = quantize_module(original, INT8).dequantized(torch.float32)
    greatest = original.a.abs().amax(dim=1)
    torch.testing.assert_close(stands_for.a.abs().amax(dim=1), greatest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_empty_rows_and_empty_adapters_are_exact(dtype: torch.dtype) -> None:
    original = module()
    original.a[3] = 0
    stands_for = quantize_module(original, dtype).dequantized(torch.float32)
    assert not stands_for.a[3].any() and torch.isfinite(stands_for.b).all()
    nothing = quantize_module(LoraModule(original.a, torch.zeros_like(original.b)), dtype)
    assert nothing.error == 0.0 and not nothing.dequantized(torch.float32).b.any()


def test_an_error_beside_nothing_is_infinite() -> None:
    rows = torch.ones(1, 4)
    assert relative_error(rows, torch.zeros(1, 4), torch.zeros(1, 4), rows) == float("inf")


def test_an_adapter_that_8_bits_spoil_is_refused_by_module_and_figure() -> None:
    """One value as great as all others of its row together: 256 steps are too coarse for the rest. fp8 has finer ones."""
    spiked = module(inputs=4096, seed=2)
    spiked.a[:, 5] = 64.0
    weights = LoraWeights("bad", {"layers.0.q_proj": module(), "layers.3.down_proj": spiked})
    refused = r"adapter bad .*'layers.3.down_proj' changes by 0\.1\d* of its norm; allowed is 0\.05"
    with pytest.raises(AdapterInexact, match=refused):
        PageFormat(torch.float32, INT8, 0.05).quantized(weights, list(weights.modules))
    _, report = PageFormat(torch.float32, FP8, 0.05).quantized(weights, list(weights.modules))
    assert report.worst < 0.05


def test_an_adapter_that_is_not_finite_is_refused() -> None:
    weights = LoraWeights("bad", {"layers.0.q_proj": module(), "layers.1.q_proj": module()})
    weights.modules["layers.1.q_proj"].b[3, 2] = torch.nan
    with pytest.raises(AdapterInexact, match=r"layers\.1\.q_proj.* inf of its norm"):
        PageFormat(torch.float32, INT8, 0.05).quantized(weights, list(weights.modules))


def test_the_report_names_every_module_and_the_worst() -> None:
    weights = LoraWeights("good", {"layers.1.q_proj": module(seed=3), "layers.0.q_proj": module(seed=4)})
    modules, report = PageFormat(torch.float32, INT8).quantized(
        weights, ["layers.0.q_proj", "layers.1.q_proj"]
    )
    assert list(modules) == list(report.errors) == ["layers.0.q_proj", "layers.1.q_proj"]
    assert report.worst == max(report.errors.values()) == report.errors[report.worst_module]


def test_formats_have_names() -> None:
    assert PageFormat.of("auto", torch.bfloat16, 0.1).dtype is torch.bfloat16
    assert PageFormat.of("fp8", torch.bfloat16, 0.1).dtype is FP8
    with pytest.raises(ValueError, match="`page_dtype` must be auto, int8 or fp8, got 'int4'"):
        PageFormat.of("int4", torch.bfloat16, 0.1)
