"""One weight in 8 or 4 bits with its scales: rounded to nearest, converted back exactly.

Invariant: w[n, k] = (q[n, k] - zero[k

G, n]) * scale[k

G, n]; only int4 has zeros, 8 by default; fp8 is per channel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F

from loraplex.engine.quantization.groups import GROUP_SIZES
from loraplex.engine.quantization.int4_packing import pack_nibbles, unpack_nibbles

_LARGEST_INT8 = 127
_LARGEST_INT4 = 7
"""The largest integer used on either side of zero, so that a group's extremes are rounded and never clipped."""
LARGEST_FP8 = 448.0
"""Largest value of float8_e4m3fn."""
BLOCK_VALUES = 1 << 22
"""Values of a weight that are rounded at once: their float32 intermediates take several times the weight's memory."""


class WeightFormat(Enum):
    """Element format of a weight: integers of 8 or 4 bits, or float8_e4m3fn."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [outputs, inputs] whose integers share a scale per output and group of `group_size` inputs.

    packed: INT8 [outputs, inputs] int8; INT4 [tiles, outputs, bytes] uint8, see `int4_packing`; FP8 [outputs, inputs]
    float8_e4m3fn. scales: [groups, outputs] bfloat16 or float32; ours are bfloat16, so that no backend has to round them
    again. zeros: [groups, outputs] uint8 of 0..15, or None: symmetric. group_size: `inputs` for one scale per output.
    """

    format: WeightFormat
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    shape: tuple[int, int]

    @property
    def outputs(self) -> int:
        return self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[1]

    @property
    def is_per_channel(self) -> bool:
        """Whether one scale serves all inputs of an output."""
        return self.group_size >= self.inputs

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.format is WeightFormat.INT4 else 8

    @property
    def num_bytes(self) -> int:
        """Bytes that a product streams: the integers, scales and zeros."""
        parts = (self.packed, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def by_rows(weight: torch.Tensor, quantize: Callable[[torch.Tensor], QuantizedWeight]) -> QuantizedWeight:
    """Apply `quantize` to `weight` some rows at a time, so that besides both a bounded number of values is in memory."""
    if weight.ndim != 2 or weight.numel() <= BLOCK_VALUES:
        return quantize(weight)
    outputs = weight.shape[0]
    whole = _of_outputs(quantize(weight[:1]), outputs)
    rows = max(1, BLOCK_VALUES // weight.shape[1])
    for start in range(0, outputs, rows):
        block = quantize(weight[start : start + rows])
        for all_outputs, part in zip(_by_output(whole), _by_output(block), strict=True):
            all_outputs[start : start + rows] = part
    return whole


def _by_output(weight: QuantizedWeight) -> list[torch.Tensor]:
    """Its tensors, viewed with the outputs first."""
    packed = weight.packed.transpose(0, 1) if weight.format is WeightFormat.INT4 else weight.packed
    return [packed, weight.scales.t(), *([] if weight.zeros is None else [weight.zeros.t()])]


def _of_outputs(weight: QuantizedWeight, outputs: int) -> QuantizedWeight:
    """Allocate a weight with `outputs` outputs, otherwise like this one of one output."""
    tiles = weight.packed.shape[:1] if weight.format is WeightFormat.INT4 else ()
    return replace(
        weight,
        packed=weight.packed.new_empty(*tiles, outputs, weight.packed.shape[-1]),
        scales=weight.scales.new_empty(weight.scales.shape[0], outputs),
        zeros=None if weight.zeros is None else weight.zeros.new_empty(weight.zeros.shape[0], outputs),
        shape=(outputs, weight.inputs),
    )


def quantize_int8(weight: torch.Tensor, group_size: int | None = None) -> QuantizedWeight:
    """Quantize weight [outputs, inputs], any float dtype, finite. `group_size` None: one scale per output. ValueError for
    other input.
    """
    inputs = weight.shape[-1]
    shared = inputs if group_size is None else group_size
    grouped = _grouped(weight, shared, GROUP_SIZES if group_size is not None else (inputs,))
    scales = _rounded_up(_nonzero(grouped.abs().amax(2) / _LARGEST_INT8))
    integers = (
        (grouped / scales.float()[..., None]).round_().to(torch.int8).flatten(1)[:, :inputs].contiguous()
    )
    return QuantizedWeight(
        format=WeightFormat.INT8,
        packed=integers,
        scales=scales.t().contiguous(),
        zeros=None,
        group_size=shared,
        shape=(weight.shape[0], inputs),
    )


def quantize_int4(weight: torch.Tensor, group_size: int = 128, *, symmetric: bool = True) -> QuantizedWeight:
    """Quantize weight [outputs, inputs], any float dtype, finite. ValueError for another group size."""
    inputs = weight.shape[-1]
    grouped = _grouped(weight, group_size, GROUP_SIZES)
    scales, zeros = int4_parameters(grouped, symmetric=symmetric)
    integers = (grouped / scales.float()[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return int4_weight(
        integers.flatten(1)[:, :inputs].to(torch.uint8),
        scales.t(),
        None if symmetric else zeros.t(),
        group_size,
    )


def int4_parameters(groups: torch.Tensor, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales (bfloat16) and zeros (float32, whole numbers of 0..15) that cover the extremes of groups [...,
    values].
    """
    if symmetric:
        scales = _rounded_up(_nonzero(groups.abs().amax(-1) / _LARGEST_INT4))
        return scales, torch.full_like(scales, 8, dtype=torch.float32)
    # The range always includes zero: the value of padding and pruned weights.
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = _rounded_up(_nonzero((high - low) / 15))
    return scales, (-low / scales.float()).round_()


def int4_weight(
    integers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> QuantizedWeight:
    """Assemble integers uint8 [outputs, inputs] of 0..15, scales and zeros [groups, outputs]; without zeros all are 8."""
    return QuantizedWeight(
        format=WeightFormat.INT4,
        packed=pack_nibbles(integers, group_size),
        scales=scales.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
        group_size=group_size,
        shape=(integers.shape[0], integers.shape[1]),
    )


def quantize_fp8(weight: torch.Tensor) -> QuantizedWeight:
    """Quantize weight [outputs, inputs], any float dtype, finite; one float32 scale per output, as the scaled product takes
    it.
    """
    inputs = weight.shape[-1]
    rows = _grouped(weight, inputs, (inputs,))[:, 0]
    scales = _nonzero(rows.abs().amax(1) / LARGEST_FP8)
    return QuantizedWeight(
        format=WeightFormat.FP8,
        packed=(rows / scales[:, None]).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn),
        scales=scales[None],
        zeros=None,
        group_size=inputs,
        shape=(weight.shape[0], inputs),
    )


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """[outputs, inputs] float32, exact: an integer times a bfloat16 scale fits the mantissa (a float32 scale rounds once)."""
    if weight.format is WeightFormat.INT4:
        integers = unpack_nibbles(weight.packed, weight.group_size, weight.inputs).float()
        integers -= 8 if weight.zeros is None else _spread(weight.zeros, weight)
    else:
        integers = weight.packed.float()
    return integers.mul_(_spread(weight.scales, weight))


def _spread(parameters: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[groups, outputs] -> [outputs, inputs] float32."""
    spread = parameters.float().t().repeat_interleave(weight.group_size, dim=1)
    return spread[:, : weight.inputs]


def _grouped(weight: torch.Tensor, group_size: int, allowed: tuple[int, ...]) -> torch.Tensor:
    """[outputs, inputs] -> [outputs, groups, group_size] float32, the last group filled with zeros."""
    if group_size not in allowed:
        raise ValueError(f"group_size is {group_size}; allowed are {', '.join(map(str, allowed))}")
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}; two dimensions of at least 1 are needed")
    if not weight.isfinite().all():
        raise ValueError("weight has values that are not finite")
    padded = F.pad(weight.float(), (0, -weight.shape[1] % group_size))
    return padded.view(padded.shape[0], -1, group_size)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """Replace the scale of a group of zeros, or of values too small to divide by, by the smallest normal scale."""
    return scales.clamp_(min=torch.finfo(torch.float32).tiny)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Round positive float32 up to bfloat16: the largest weight of a group must fit."""
    bits = scales.view(torch.int32) + 0xFFFF
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)
