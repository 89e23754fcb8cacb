"""Reads compressed-tensors' `quantization_config` (https://github.com/vllm-project/compressed-tensors) of a config.json.
Free of torch.

Invariant: a setting that would change a weight or an activation and is not supported here is refused by name, never
ignored.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from loraplex.engine.errors import ModelError
from loraplex.engine.quantization.checkpoint_format import Sharing, StoredWeight, StoredWeights

QUANT_METHOD = "compressed-tensors"
_PACKED_FORMAT = "pack-quantized"
_PLAIN_FORMATS = {
    "int": ("int-quantized", "naive-quantized"),
    "float": ("float-quantized", "naive-quantized"),
}
_SCALE_DTYPES = (None, "torch.bfloat16", "torch.float16", "torch.float32")
_KEPT_ORDERS = (None, False, "weight", "static")
"""Orders of calibration that leave the stored columns in place."""
_SMALLEST_GROUP = 32


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """How one kind of tensor is quantized."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    block_structure: Any = None
    dynamic: bool | str = False
    actorder: bool | str | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    """Modules that are quantized alike."""

    targets: list[str]
    weights: _Arguments
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _Config(msgspec.Struct, forbid_unknown_fields=True):
    config_groups: dict[str, _Group]
    quant_method: str
    format: str
    quantization_status: str
    ignore: list[str] | None = None
    version: str | None = None
    global_compression_ratio: float | None = None
    kv_cache_scheme: Any = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    moe_sparsity_config: dict[str, Any] | None = None


def stored_weights(values: object) -> StoredWeights:
    """`values` is the `quantization_config` of a config.json, an untrusted file. Raises `ModelError` naming the field."""
    method = values.get("quant_method") if isinstance(values, Mapping) else None
    if method != QUANT_METHOD:
        raise _error("quant_method", f"{QUANT_METHOD!r}", method)
    try:
        config = msgspec.convert(values, _Config)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: 'quantization_config': {error}") from error
    _refuse_unsupported(config)
    targets: dict[str, StoredWeight] = {}
    for name, group in config.config_groups.items():
        stored = _stored(f"config_groups.{name}", group, group.format or config.format)
        targets |= dict.fromkeys(group.targets, stored)
    return StoredWeights(targets, tuple(config.ignore or ()))


def _refuse_unsupported(config: _Config) -> None:
    if config.quantization_status != "compressed":
        raise _error("quantization_status", "'compressed'", config.quantization_status)
    if config.kv_cache_scheme is not None:
        raise _error("kv_cache_scheme", "null: the engine chooses the type of its KV cache itself", "one")
    sparsity = config.sparsity_config or {}
    if sparsity.get("format", "dense") != "dense":
        raise _error("sparsity_config.format", "'dense'", sparsity["format"])
    if (config.transform_config or {}).get("config_groups"):
        raise _error("transform_config", "empty", "transforms of activations")
    if config.moe_sparsity_config:
        raise _error("moe_sparsity_config", "empty", config.moe_sparsity_config)


def _stored(path: str, group: _Group, form: str) -> StoredWeight:
    weights = group.weights
    _check_activations(path, group)
    _check_weights(f"{path}.weights", weights)
    allowed = (*_PLAIN_FORMATS[weights.type], *([_PACKED_FORMAT] if weights.type == "int" else []))
    if form not in allowed:
        raise _error("format", f"one of {', '.join(allowed)} for {path}", form)
    sharing = _sharing(f"{path}.weights", weights)
    if not weights.symmetric and (weights.num_bits, sharing is Sharing.TENSOR) != (4, False):
        raise _error(f"{path}.weights.symmetric", "true, but for 4 bits per channel or group", False)
    return StoredWeight(
        num_bits=weights.num_bits,
        is_float=weights.type == "float",
        is_packed=form == _PACKED_FORMAT,
        sharing=sharing,
        group_size=weights.group_size if sharing is Sharing.GROUP else None,
        symmetric=weights.symmetric,
    )


def _check_activations(path: str, group: _Group) -> None:
    """Check the activations. Rounding row by row needs nothing from the checkpoint, and a more exact computation is valid
    too.
    """
    if group.output_activations is not None:
        raise _error(f"{path}.output_activations", "null", "quantized outputs")
    inputs = group.input_activations
    if inputs is None:
        return
    if inputs.dynamic is not True:
        raise _error(f"{path}.input_activations.dynamic", "true: static scales are not used", inputs.dynamic)
    if inputs.strategy != "token" or inputs.num_bits != 8:
        got = f"{inputs.num_bits} bits per {inputs.strategy}"
        raise _error(f"{path}.input_activations", "8 bits with strategy 'token'", got)


def _check_weights(path: str, weights: _Arguments) -> None:
    if weights.type not in _PLAIN_FORMATS:
        raise _error(f"{path}.type", "'int' or 'float'", weights.type)
    if weights.num_bits not in ((4, 8) if weights.type == "int" else (8,)):
        raise _error(f"{path}.num_bits", "8, or 4 for integers", weights.num_bits)
    if weights.dynamic is not False:
        raise _error(f"{path}.dynamic", "false", weights.dynamic)
    if weights.actorder not in _KEPT_ORDERS:
        raise _error(
            f"{path}.actorder", "null or 'weight': columns in another order are not read", weights.actorder
        )
    if weights.block_structure is not None:
        raise _error(f"{path}.block_structure", "null", weights.block_structure)
    if weights.scale_dtype not in _SCALE_DTYPES:
        raise _error(f"{path}.scale_dtype", "a float of 16 or 32 bits", weights.scale_dtype)


def _sharing(path: str, weights: _Arguments) -> Sharing:
    size = weights.group_size
    named = weights.strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    allowed = [
        sharing.value for sharing in Sharing if not (weights.type == "float" and sharing is Sharing.GROUP)
    ]
    if named not in allowed:
        raise _error(f"{path}.strategy", f"one of {', '.join(allowed)}", named)
    if named == Sharing.GROUP.value and (size is None or size <= 0 or size % _SMALLEST_GROUP):
        raise _error(f"{path}.group_size", f"a multiple of {_SMALLEST_GROUP}", size)
    return Sharing(named)


def _error(field: str, allowed: str, got: object) -> ModelError:
    return ModelError(f"config.json: 'quantization_config.{field}' must be {allowed}, got {got!r}")
