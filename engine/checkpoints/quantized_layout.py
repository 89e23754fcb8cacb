"""Which parameters a checkpoint stores quantized, in which tensors, and with what groups they are loaded. Free of torch.

Invariant: the parts of one matrix are quantized in the same bits, or refused by name.
"""

from collections.abc import Iterator, Mapping, Sequence

from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.parameters import Parameter, Part
from loraplex.engine.quantization.checkpoint_format import EMBEDDING, LINEAR, StoredWeight
from loraplex.engine.quantization.groups import GROUP_SIZES

_EMBEDDING_MODULE = "model.embed_tokens"


def stored_by_module(config: ModelConfig, parameters: Sequence[Parameter]) -> dict[str, StoredWeight]:
    """Return what the checkpoint stores quantized, by module name. Raises `ModelError`."""
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
    """Return the tensors of a part, and whether each is required."""
    scheme = stored.get(module_of(part)) if part.columns else None
    if scheme is None:
        yield part.source, True
        return
    yield tensor_name(part, "weight_packed" if scheme.is_packed else "weight"), True
    yield tensor_name(part, "weight_scale"), True
    yield tensor_name(part, "weight_zero_point"), not scheme.symmetric
    if scheme.is_packed:
        yield tensor_name(part, "weight_shape"), True


def stored_parts(parameter: Parameter, stored: Mapping[str, StoredWeight]) -> list[StoredWeight]:
    """Return how each part of a quantized parameter is stored; empty for one that is not quantized."""
    return [stored[module_of(part)] for part in parameter.parts if part.columns and module_of(part) in stored]


def shared_group_size(parts: Sequence[StoredWeight], inputs: int) -> int:
    """Return the largest group size that divides those of all parts; `inputs` where an 8-bit row has one scale."""
    sizes = {part.group_size for part in parts if part.group_size not in (None, inputs)}
    if not sizes and parts[0].num_bits == 8:
        return inputs
    return next(size for size in GROUP_SIZES if all(stored and stored % size == 0 for stored in sizes))


def quantized_already(scheme: str) -> ModelError:
    return ModelError(f"`quantization` must be none for a checkpoint that is quantized, got {scheme!r}")


def module_of(part: Part) -> str:
    """Return the module that owns a part's weight or bias."""
    return part.source.rpartition(".")[0]


def tensor_name(part: Part, tensor: str) -> str:
    return f"{module_of(part)}.{tensor}"


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
