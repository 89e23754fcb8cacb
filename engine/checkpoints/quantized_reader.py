"""Reads a quantized parameter of a compressed-tensors checkpoint, and joins its parts below each other.

Invariant: integers and scales are moved and repeated, and never rounded. A tensor of another shape or type, or with values that
its scheme does not allow, is refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loraplex.engine.checkpoints.quantized_layout import shared_group_size, tensor_name
from loraplex.engine.checkpoints.reader import Checkpoint
from loraplex.engine.errors import ModelError
from loraplex.engine.models.parameters import Parameter, Part
from loraplex.engine.quantization.checkpoint_format import Sharing, StoredWeight
from loraplex.engine.quantization.int4_packing import pack_nibbles
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat

_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class CompressedPart:
    """integers [rows, columns]: int8, float8_e4m3fn, or uint8 of 0..15; scales and zeros [groups, rows]."""

    format: WeightFormat
    integers: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int


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


def read_part(checkpoint: Checkpoint, part: Part, scheme: StoredWeight) -> CompressedPart:
    """Read the tensors of one module, in groups as they are stored. Raises `ModelError` naming the tensor."""
    integers = _packed(checkpoint, part, scheme) if scheme.is_packed else _plain(checkpoint, part, scheme)
    scales = _scales(checkpoint, part, scheme)
    zeros = _zeros(checkpoint, part, scheme)
    return CompressedPart(_format(scheme), integers, scales, zeros, scheme.group_size or part.shape[1])


def _format(scheme: StoredWeight) -> WeightFormat:
    if scheme.is_float:
        return WeightFormat.FP8
    return WeightFormat.INT4 if scheme.num_bits == 4 else WeightFormat.INT8


def _packed(checkpoint: Checkpoint, part: Part, scheme: StoredWeight) -> Tensor:
    """Unpack int32 words from their lowest bits on, biased by half the range: [rows, columns]."""
    rows, columns = part.shape
    shape = _tensor(checkpoint, part, "weight_shape", (2,), (torch.int64, torch.int32))
    if tuple(shape.tolist()) != part.shape:
        raise ModelError(
            f"tensor {tensor_name(part, 'weight_shape')!r} must hold {part.shape}, got {shape.tolist()}"
        )
    words = -(-columns * scheme.num_bits // 32)
    packed = _tensor(checkpoint, part, "weight_packed", (rows, words), (torch.int32,))
    return _unpacked(packed, scheme.num_bits)[:, :columns]


def _unpacked(words: Tensor, num_bits: int) -> Tensor:
    """[rows, words] int32 -> [rows, elements]: uint8 of 0..15, or int8."""
    octets = words.contiguous().view(torch.uint8)
    if num_bits == 8:
        return torch.bitwise_xor(octets, 0x80).view(torch.int8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _plain(checkpoint: Checkpoint, part: Part, scheme: StoredWeight) -> Tensor:
    expected = torch.float8_e4m3fn if scheme.is_float else torch.int8
    weight = _tensor(checkpoint, part, "weight", part.shape, (expected,))
    if scheme.is_float:
        if bool((weight.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ModelError(f"tensor {part.source!r} has values that are not finite")
        return weight
    return weight if scheme.num_bits == 8 else _biased(weight, part.source)


def _biased(integers: Tensor, name: str) -> Tensor:
    """int8 of -8..7 -> uint8 of 0..15."""
    if integers.numel() and not -8 <= int(integers.min()) <= int(integers.max()) <= 7:
        raise ModelError(f"tensor {name!r} has values outside of -8..7")
    return (integers + 8).to(torch.uint8)


def _scales(checkpoint: Checkpoint, part: Part, scheme: StoredWeight) -> Tensor:
    """[groups, rows] bfloat16 or float32."""
    shapes = [_shared_shape(part, scheme)]
    if scheme.sharing is Sharing.TENSOR:
        shapes.append(())
    scales = _tensor(checkpoint, part, "weight_scale", shapes, _SCALE_DTYPES)
    if not bool(scales.isfinite().all()) or bool((scales < 0).any()):
        raise ModelError(f"tensor {tensor_name(part, 'weight_scale')!r} must be finite and not negative")
    if scales.dtype is not torch.bfloat16:
        scales = scales.float()
    if scheme.sharing is Sharing.TENSOR:
        return scales.reshape(1, 1).expand(1, part.rows)
    return scales.t()


def _shared_shape(part: Part, scheme: StoredWeight) -> tuple[int, ...]:
    rows, columns = part.shape
    if scheme.sharing is Sharing.TENSOR:
        return (1,)
    if scheme.group_size is None:
        return (rows, 1)
    if columns % scheme.group_size:
        raise ModelError(
            f"tensor {tensor_name(part, 'weight_scale')!r}: {columns} inputs are not whole groups of {scheme.group_size}"
        )
    return (rows, columns // scheme.group_size)


def _zeros(checkpoint: Checkpoint, part: Part, scheme: StoredWeight) -> Tensor | None:
    """[groups, rows] uint8 of 0..15; None for a symmetric weight, whose stored zero points must be zeros."""
    name = tensor_name(part, "weight_zero_point")
    if scheme.symmetric:
        if name in checkpoint.names() and bool((checkpoint.get(name).float() != 0).any()):
            raise ModelError(f"tensor {name!r} must be zeros: the weight is symmetric")
        return None
    rows, groups = _shared_shape(part, scheme)
    # Packed along the rows by newer versions, one per element by older ones.
    words = -(-rows * scheme.num_bits // 32)
    plain, packed = (rows, groups), (words, groups)
    zeros = _tensor(checkpoint, part, "weight_zero_point", [plain, packed], (torch.int8, torch.int32))
    if zeros.dtype is torch.int32 and tuple(zeros.shape) == packed:
        return _unpacked(zeros.t(), scheme.num_bits)[:, :rows]
    if zeros.dtype is torch.int8 and tuple(zeros.shape) == plain:
        return _biased(zeros, name).t()
    raise ModelError(f"tensor {name!r} must be int8 of shape {plain} or int32 of shape {packed}")


def _tensor(
    checkpoint: Checkpoint,
    part: Part,
    kind: str,
    shapes: tuple[int, ...] | list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    name, tensor = tensor_name(part, kind), checkpoint.get(tensor_name(part, kind))
    allowed = shapes if isinstance(shapes, list) else [shapes]
    if tuple(tensor.shape) not in allowed:
        wanted = " or ".join(map(str, allowed))
        raise ModelError(f"tensor {name!r} must have shape {wanted}, got {tuple(tensor.shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"tensor {name!r} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor
