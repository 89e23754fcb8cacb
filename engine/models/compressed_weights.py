"""The quantized parameters of a compressed-tensors checkpoint: which they are, and their parts one below the other.

Invariant: joining moves integers and repeats scales, and rounds neither; parts in different bits are refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.engine.errors import ModelError
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.compressed_part import CompressedPart, module_of, read_part, tensor_name
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import Parameter, Part
from loraplex.engine.quantization.nibbles import pack_nibbles
from loraplex.engine.quantization.stored_weights import EMBEDDING, LINEAR, StoredWeight
from loraplex.engine.quantization.weight import GROUP_SIZES, QuantizedWeight, WeightFormat

_EMBEDDING_MODULE = "model.embed_tokens"


def stored_by_module(config: ModelConfig, parameters: Sequence[Parameter]) -> dict[str, StoredWeight]:
    """What the checkpoint stores quantized, by the module's name. Raises `ModelError`."""
    if config.compression is None:
        return {}
    modules = (module_of(part) for parameter in parameters for part in parameter.parts if part.columns)
    stored = config.compression.of(
        (name, EMBEDDING if name == _EMBEDDING_MODULE else LINEAR) for name in modules
    )
    if _EMBEDDING_MODULE in stored:
        raise ModelError(
            f"config.json: 'quantization_config' quantizes {_EMBEDDING_MODULE}, which is not supported"
        )
    for parameter in parameters:
        _check_alike(parameter, stored)
    return stored


def tensor_names(part: Part, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, bool]]:
    """The tensors that make a part, and whether each must be there."""
    scheme = stored.get(module_of(part)) if part.columns else None
    if scheme is None:
        yield part.source, True
        return
    yield tensor_name(part, "weight_packed" if scheme.is_packed else "weight"), True
    yield tensor_name(part, "weight_scale"), True
    yield tensor_name(part, "weight_zero_point"), not scheme.symmetric
    if scheme.is_packed:
        yield tensor_name(part, "weight_shape"), True


def read_quantized(
    checkpoint: Checkpoint,
    parameter: Parameter,
    stored: Mapping[str, StoredWeight],
    device: torch.device | str = "cpu",
) -> QuantizedWeight:
    """The parts of a quantized parameter, one below the other. Raises `ModelError` naming the tensor."""
    return _moved(
        _joined([read_part(checkpoint, part, stored[module_of(part)]) for part in parameter.parts]), device
    )


def is_quantized(parameter: Parameter, stored: Mapping[str, StoredWeight]) -> bool:
    return parameter.parts[0].columns is not None and module_of(parameter.parts[0]) in stored


def _check_alike(parameter: Parameter, stored: Mapping[str, StoredWeight]) -> None:
    kinds = {module_of(part): stored.get(module_of(part)) for part in parameter.parts if part.columns}
    if len({None if kind is None else (kind.num_bits, kind.is_float) for kind in kinds.values()}) > 1:
        named = ", ".join(f"{module} {_described(kind)}" for module, kind in kinds.items())
        raise ModelError(
            f"config.json: 'quantization_config' must quantize the parts of a matrix alike, got {named}"
        )


def _described(kind: StoredWeight | None) -> str:
    if kind is None:
        return "not quantized"
    return f"in {kind.num_bits} bits of {'float' if kind.is_float else 'integer'}"


def _joined(parts: list[CompressedPart]) -> QuantizedWeight:
    group_size = _group_size(parts)
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


def _group_size(parts: list[CompressedPart]) -> int:
    """The largest that every part's groups are made of; all inputs where a row has one scale."""
    sizes = {part.group_size for part in parts if part.scales.shape[0] > 1}
    if not sizes and parts[0].format is not WeightFormat.INT4:
        return parts[0].integers.shape[1]
    return next(size for size in GROUP_SIZES if all(stored % size == 0 for stored in sizes))


def _regrouped(part: CompressedPart, group_size: int) -> CompressedPart:
    """The same scales, repeated for the smaller groups that one of them serves."""
    if part.scales.shape[0] > 1:
        repeats = part.group_size // group_size
    else:
        repeats = -(-part.integers.shape[1] // group_size)
    zeros = None if part.zeros is None else part.zeros.repeat_interleave(repeats, dim=0)
    return replace(part, scales=part.scales.repeat_interleave(repeats, dim=0), zeros=zeros)


def _scale_dtype(parts: list[CompressedPart]) -> torch.dtype:
    """One that holds the scales of all parts; fp8 products take float32."""
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
