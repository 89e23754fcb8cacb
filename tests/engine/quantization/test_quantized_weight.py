"""Quantized weights: what rounding to nearest may lose, what packing must not."""

from typing import Any

import pytest
import torch

from loraplex.engine.quantization import quantized_weight as module
from loraplex.engine.quantization.groups import GROUP_SIZES, span_of
from loraplex.engine.quantization.int4_packing import pack_nibbles, unpack_nibbles
from loraplex.engine.quantization.quantized_weight import (
    QuantizedWeight,
    WeightFormat,
    by_rows,
    dequantize,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from loraplex.engine.quantization.scheme import quantize_parameter

SHAPES = ((1, 1), (3, 31), (5, 128), (17, 129), (16, 192), (33, 320))


def matrix(shape: tuple[int, int]) -> torch.Tensor:
    """Weights with rows of very different size, one row of zeros and one group of zeros."""
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[0])[:, None]
    weight[:, 32:64] = 0
    weight[shape[0] // 2] = 0
    return weight


def step_of(quantized: QuantizedWeight) -> torch.Tensor:
    """[outputs, inputs]: the distance of neighbouring integers' weights."""
    spread = quantized.scales.float().t().repeat_interleave(quantized.group_size, dim=1)
    return spread[:, : quantized.inputs]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group_size", [None, *GROUP_SIZES])
def test_int8_is_within_half_a_step(
    shape: tuple[int, int], dtype: torch.dtype, group_size: int | None
) -> None:
    weight = matrix(shape).to(dtype)
    quantized = quantize_int8(weight, group_size)
    assert quantized.format is WeightFormat.INT8
    assert quantized.packed.shape == shape and quantized.packed.dtype is torch.int8
    assert quantized.packed.min() >= -127
    error = (dequantize(quantized) - weight.float()).abs()
    assert (error <= step_of(quantized) * 0.5001).all()
    assert (step_of(quantized) <= weight.float().abs().amax(1, keepdim=True) / 127 * 1.008 + 1e-37).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_is_within_half_a_step(shape: tuple[int, int]) -> None:
    weight = matrix(shape)
    quantized = quantize_fp8(weight)
    assert quantized.format is WeightFormat.FP8 and quantized.scales.dtype is torch.float32
    # Three bits of mantissa; the smallest step is 2**-9.
    error = (dequantize(quantized) - weight).abs()
    assert (error <= weight.abs() * 2**-4 * 1.0001 + quantized.scales.t() * 2**-10).all()
    largest = weight.abs().amax(1)
    torch.testing.assert_close(dequantize(quantized).abs().amax(1), largest, rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_int4_is_within_half_a_step(shape: tuple[int, int], symmetric: bool, group_size: int) -> None:
    weight = matrix(shape)
    quantized = quantize_int4(weight, group_size, symmetric=symmetric)
    assert quantized.format is WeightFormat.INT4 and (quantized.zeros is None) is symmetric
    back = dequantize(quantized)
    assert ((back - weight).abs() <= step_of(quantized) * 0.5001).all()
    assert (back[weight == 0] == 0).all()
    spread = 14 if symmetric else 15
    width = 2 * weight.abs().amax(1, keepdim=True) if symmetric else weight.amax(1) - weight.amin(1)
    if shape[1] <= group_size and symmetric:
        assert (step_of(quantized) <= width / spread * 1.008 + 1e-37).all()


def test_asymmetric_int4_follows_a_group_that_lies_to_one_side() -> None:
    weight = torch.rand(8, 128, generator=torch.Generator().manual_seed(1)) + 0.5
    errors = [
        (dequantize(quantize_int4(weight, 128, symmetric=symmetric)) - weight).abs().mean()
        for symmetric in (True, False)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_dequantizing_rounds_nothing() -> None:
    weight = matrix((9, 200))
    for quantized in (quantize_int8(weight), quantize_int8(weight, 64)):
        exact = quantized.packed.double() * step_of(quantized).double()
        assert torch.equal(dequantize(quantized).double(), exact)
    for symmetric in (True, False):
        quantized = quantize_int4(weight, 32, symmetric=symmetric)
        integers = unpack_nibbles(quantized.packed, 32, 200).double()
        zeros = torch.full_like(quantized.scales, 8) if quantized.zeros is None else quantized.zeros
        integers -= zeros.double().t().repeat_interleave(32, dim=1)[:, :200]
        assert torch.equal(dequantize(quantized).double(), integers * step_of(quantized).double())


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("inputs", [1, 63, 64, 65, 128, 200, 384])
def test_nibbles_come_back(inputs: int, group_size: int) -> None:
    integers = torch.randint(0, 16, (5, inputs), generator=torch.Generator().manual_seed(inputs)).to(
        torch.uint8
    )
    packed = pack_nibbles(integers, group_size)
    span = span_of(group_size)
    assert packed.shape == (-(-inputs // span), 5, span // 2)
    assert torch.equal(unpack_nibbles(packed, group_size, inputs), integers)
    assert packed[0, 3, 0] & 15 == integers[3, 0]
    if inputs > span // 2:
        assert packed[0, 3, 0] >> 4 == integers[3, span // 2]


def test_size_is_what_a_product_reads() -> None:
    weight = torch.ones(64, 256)
    assert quantize_int8(weight).num_bytes == 64 * 256 + 64 * 2
    assert quantize_int4(weight, 128).num_bytes == 64 * 256 // 2 + 64 * 2 * 2
    assert quantize_int4(weight, 128, symmetric=False).num_bytes == 64 * 256 // 2 + 64 * 2 * 3


@pytest.mark.parametrize(
    ("weight", "group_size"),
    [
        (torch.ones(4, 128), 16),
        (torch.ones(4, 128), 0),
        (torch.ones(128), 128),
        (torch.ones(0, 128), 128),
        (torch.full((4, 128), torch.nan), 128),
        (torch.full((4, 128), torch.inf), 128),
    ],
    ids=["group 16", "group 0", "vector", "empty", "nan", "infinity"],
)
def test_what_cannot_be_quantized_is_refused(weight: torch.Tensor, group_size: int) -> None:
    with pytest.raises(ValueError, match="group_size|shape|finite"):
        quantize_int4(weight, group_size)
    with pytest.raises(ValueError, match="group_size|shape|finite"):
        quantize_int8(weight, group_size)


QUANTIZERS = {
    "int8": quantize_int8,
    "int4": lambda weight: quantize_int4(weight, 32),
    "int4 with zeros": lambda weight: quantize_int4(weight, 64, symmetric=False),
    "fp8": quantize_fp8,
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rounding_some_rows_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module, "BLOCK_VALUES", 1000)
    quantize, weight = QUANTIZERS[name], matrix((33, 320))
    whole, blocks = quantize(weight), by_rows(weight, quantize)
    assert (blocks.shape, blocks.group_size, blocks.format) == (whole.shape, whole.group_size, whole.format)
    assert torch.equal(blocks.packed.view(torch.uint8), whole.packed.view(torch.uint8))
    assert torch.equal(blocks.scales, whole.scales)
    assert (blocks.zeros is None) is (whole.zeros is None)
    assert whole.zeros is None or (blocks.zeros is not None and torch.equal(blocks.zeros, whole.zeros))
    assert blocks.packed.is_contiguous() and blocks.scales.is_contiguous()


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_no_more_than_a_block_is_held_in_float32(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    held: list[int] = []
    grouped = module._grouped

    def watched(weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        held.append(weight.numel())
        return grouped(weight, *arguments)

    monkeypatch.setattr(module, "BLOCK_VALUES", 4096)
    monkeypatch.setattr(module, "_grouped", watched)
    quantize_parameter("layers.0.o", torch.ones(512, 256, dtype=torch.bfloat16), scheme)
    assert max(held) == 4096 and sum(held) >= 512 * 256
