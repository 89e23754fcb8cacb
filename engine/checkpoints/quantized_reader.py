"""Reads a quantized parameter of a compressed-tensors checkpoint and joins its parts below each other.

Invariant: joining moves integers and repeats scales, and rounds neither.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.engine.checkpoints.quantized_layout import shared_group_size
from loraplex.engine.checkpoints.quantized_part import CompressedPart, read_part
from loraplex.engine.checkpoints.reader import Checkpoint
from loraplex.engine.models.parameters import Parameter
from loraplex.engine.quantization.checkpoint_format import StoredWeight
from loraplex.engine.quantization.int4_packing import pack_nibbles
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat


def read_quantized(
    checkpoint: Checkpoint,
    parameter: Parameter,
    stored: Sequence[StoredWeight],
    device: torch.device | str = "cpu",
) -> QuantizedWeight:
    """Read and join the parts of a parameter; `stored` describes each part. Raises `ModelError` naming the tensor."""
    parts = [read_part(checkpoint, *each) for each in zip(parameter.parts, stored, strict=True)]
    return _moved(_joined(parts, shared_group_size(stored, parameter.shape[1])), device)


def _joined(parts: list[CompressedPart], group_size: int) -> QuantizedWeight:
    parts = [_regrouped(part, group_size) for part in parts]
    kind = parts[0].format
    integers = torch.cat([part.integers for part in parts])
    return QuantizedWeight(
        format=kind,
        packed=pack_nibbles(integers, group_size) if kind is WeightFormat.INT4 else integers,
        scales=torch.cat([part.scales.to(_scale_dtype(parts)) for part in parts], dim=1),
        zeros=_joined_zeros(parts),
        group_size=group_size,
        shape=(integers.shape[0], integers.shape[1]),
    )


def _regrouped(part: CompressedPart, group_size: int) -> CompressedPart:
    """Repeat each scale for the smaller groups that it covers."""
    if part.scales.shape[0] > 1:
        repeats = part.group_size // group_size
    else:
        repeats = -(-part.integers.shape[1] // group_size)
    zeros = None if part.zeros is None else part.zeros.repeat_interleave(repeats, dim=0)
    return replace(part, scales=part.scales.repeat_interleave(repeats, dim=0), zeros=zeros)


def _scale_dtype(parts: list[CompressedPart]) -> torch.dtype:
    """Return a type that represents the scales of all parts; fp8 products take float32."""
    if parts[0].format is WeightFormat.FP8:
        return torch.float32
    return torch.bfloat16 if all(part.scales.dtype is torch.bfloat16 for part in parts) else torch.float32


def _joined_zeros(parts: list[CompressedPart]) -> Tensor | None:
    if all(part.zeros is None for part in parts):
        return None
    filled = [
        torch.full(part.scales.shape, 8, dtype=torch.uint8) if part.zeros is None else part.zeros
        for part in parts
    ]
    return torch.cat(filled, dim=1)


def _moved(weight: QuantizedWeight, device: torch.device | str) -> QuantizedWeight:
    return replace(
        weight,
        packed=weight.packed.to(device),
        scales=weight.scales.to(device),
        zeros=None if weight.zeros is None else weight.zeros.to(device),
    )
