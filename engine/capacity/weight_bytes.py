"""Bytes of a model's loaded parameters, by kind and format, from its configuration alone. Free of torch.

Invariant: the figures are those of the tensors that `decoder_state` makes; a CPU may lay some of them out once more.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraplex.engine.checkpoints.quantized_layout import (
    quantized_already,
    shared_group_size,
    stored_by_module,
    stored_parts,
)
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import Parameter, decoder_parameters
from loraplex.engine.quantization.checkpoint_format import StoredWeight
from loraplex.engine.quantization.groups import largest_group, span_of

EMBEDDINGS, PROJECTIONS, HEAD, OTHERS = "embeddings", "projections", "lm_head", "norms and biases"
ITEM_SIZES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_KINDS = {"embed_tokens": EMBEDDINGS, "lm_head": HEAD} | dict.fromkeys(
    ("qkv", "o", "gate_up", "down"), PROJECTIONS
)
_ORDER = (EMBEDDINGS, PROJECTIONS, HEAD, OTHERS)
_BFLOAT16_SCALE_BYTES = 2
_FLOAT32_SCALE_BYTES = 4
_ZERO_BYTES = 1


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Parameters that are listed together: `count` numbers in `format`, such as bfloat16, int8 or int4/128."""

    kind: str
    format: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """`group_size` inputs of a quantized matrix share a scale of `scale_bytes`, zero point included."""

    bits: str
    group_size: int
    scale_bytes: int

    def num_bytes(self, outputs: int, inputs: int) -> int:
        scales = -(-inputs // self.group_size) * outputs * self.scale_bytes
        if self.bits != "int4":
            return outputs * inputs + scales
        span = span_of(self.group_size)
        return -(-inputs // span) * (span // 2) * outputs + scales

    def label(self, inputs: int) -> str:
        return self.bits if self.group_size == inputs else f"{self.bits}/{self.group_size}"


def weight_bytes(model: ModelConfig, dtype: str, scheme: str) -> tuple[WeightBytes, ...]:
    """Return every kind in each of its formats. `dtype` names a float type; `scheme` none, int8, int4 or fp8.

    Raises `ModelError` as loading does: for a scheme where the checkpoint is quantized already.
    """
    parameters = list(decoder_parameters(model))
    stored = stored_by_module(model, parameters)
    if stored and scheme != "none":
        raise quantized_already(scheme)
    found: dict[tuple[str, str], WeightBytes] = {}
    for parameter in parameters:
        for kind, format_name, num_bytes in _entries(model, parameter, stored, dtype, scheme):
            before = found.get((kind, format_name), WeightBytes(kind, format_name, 0, 0))
            count = before.count + _count(parameter)
            found[kind, format_name] = WeightBytes(kind, format_name, count, before.num_bytes + num_bytes)
    return tuple(sorted(found.values(), key=lambda entries: _ORDER.index(entries.kind)))


def has_dense_products(weights: Iterable[WeightBytes], dtype: str) -> bool:
    """Return whether a projection or the head keeps `dtype`. A head without an entry is that of the embeddings."""
    quantized, dense = set[str](), set[str]()
    for entry in weights:
        (dense if entry.format == dtype else quantized).add(entry.kind)
    return not {PROJECTIONS, HEAD} <= quantized - dense


def _entries(
    model: ModelConfig, parameter: Parameter, stored: Mapping[str, StoredWeight], dtype: str, scheme: str
) -> list[tuple[str, str, int]]:
    """Return (kind, format, bytes): two entries for an embedding whose head is quantized separately."""
    kind = _KINDS.get(parameter.name.rpartition(".")[2], OTHERS)
    entries = [(kind, *_format_and_bytes(kind, parameter, stored, dtype, scheme))]
    if kind == EMBEDDINGS and model.tie_word_embeddings and scheme != "none":
        entries.append((HEAD, *_format_and_bytes(HEAD, parameter, stored, dtype, scheme)))
    return entries


def _format_and_bytes(
    kind: str, parameter: Parameter, stored: Mapping[str, StoredWeight], dtype: str, scheme: str
) -> tuple[str, int]:
    layout = _stored_layout(parameter, stored, dtype) or _own_layout(kind, parameter, scheme)
    if layout is None:
        return dtype, _count(parameter) * ITEM_SIZES[dtype]
    outputs, inputs = parameter.shape
    return layout.label(inputs), layout.num_bytes(outputs, inputs)


def _stored_layout(parameter: Parameter, stored: Mapping[str, StoredWeight], dtype: str) -> _Layout | None:
    """Layout of a parameter that the checkpoint stores quantized. Its scales are assumed to have the model's type; float16
    scales grow.
    """
    parts = stored_parts(parameter, stored)
    if not parts:
        return None
    bits = "fp8" if parts[0].is_float else f"int{parts[0].num_bits}"
    scale_bytes = _BFLOAT16_SCALE_BYTES if dtype == "bfloat16" and bits != "fp8" else _FLOAT32_SCALE_BYTES
    zero_bytes = any(not part.symmetric for part in parts)
    return _Layout(bits, shared_group_size(parts, parameter.shape[1]), scale_bytes + zero_bytes)


def _own_layout(kind: str, parameter: Parameter, scheme: str) -> _Layout | None:
    """Layout of a parameter that is quantized while it is loaded, see `quantization.scheme`."""
    if scheme == "none" or kind not in (PROJECTIONS, HEAD) or len(parameter.shape) != 2:
        return None
    inputs = parameter.shape[1]
    if scheme == "fp8":
        return _Layout(scheme, inputs, _FLOAT32_SCALE_BYTES)
    if scheme == "int8" or kind == HEAD:
        return _Layout("int8", inputs, _BFLOAT16_SCALE_BYTES)
    return _Layout(scheme, largest_group(inputs), _BFLOAT16_SCALE_BYTES + _ZERO_BYTES)


def _count(parameter: Parameter) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count
