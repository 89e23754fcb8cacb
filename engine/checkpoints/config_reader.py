"""`load_model_config`: config.json (or a GGUF header) to `ModelConfig`, without torch and without running code of the
model.

Invariant: a field that this decoder would compute differently from `transformers` is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.engine.checkpoints.gguf_header import gguf_config
from loraplex.engine.checkpoints.model_files import locate_model
from loraplex.engine.errors import ModelError, UnsupportedArchitecture
from loraplex.engine.models.architectures import Architecture, architecture_of
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.config_fields import Fields
from loraplex.engine.quantization.checkpoint_format import StoredWeights
from loraplex.engine.quantization.compressed_tensors_config import stored_weights

MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 1024
"""The deepest models have some 130 layers; each layer has its own entry in plans, tables and names."""


def load_model_config(path: str) -> ModelConfig:
    """`path` is a directory, a `.gguf` file or a hub id.

    Raises `UnsupportedArchitecture`, or `ModelError` naming the file or field.
    """
    located = locate_model(path)
    if located.is_file():
        return normalise_config(gguf_config(located))
    generation = located / "generation_config.json"
    return normalise_config(
        read_json_object(located / "config.json"),
        read_json_object(generation) if generation.is_file() else {},
    )


def normalise_config(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`values` and `generation` are the objects of config.json and generation_config.json."""
    name, architecture = architecture_of(values)
    fields = Fields(values, architecture.defaults)
    _refuse_unsupported(fields)
    num_layers, num_heads = fields.size("num_hidden_layers", MAX_LAYERS), fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    return ModelConfig(
        architecture=name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, values, num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_bias(fields, architecture.qkv_bias),
        o_bias=_bias(fields, architecture.o_bias),
        mlp_bias=_bias(fields, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        uses_rope=architecture.rope_layers(fields, num_layers),
        sliding_window=architecture.windows(fields, num_layers),
        hf_config=dict(values),
        eos_token_ids=_eos_token_ids(fields, Fields(generation or {}, {})),
        compression=_compression(fields),
        **_scales(fields, architecture, head_dim),
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object of at most 4 MiB. Raises `ModelError` naming the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return values


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("auto_map"):
        raise UnsupportedArchitecture(
            "config.json: 'auto_map' asks to run code of the model, which is never done"
        )
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.error("hidden_act", "'silu'")
    if fields.flag("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "false")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise ModelError(
            f"config.json: 'hidden_size' {hidden_size} must be a multiple of 'num_attention_heads' {num_heads}"
        )
    head_dim = fields.size("head_dim") if fields.has("head_dim") else hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"config.json: 'head_dim' must be even, got {head_dim}")
    return head_dim


def _num_kv_heads(fields: Fields, values: Mapping[str, Any], num_heads: int) -> int:
    explicit_null = "num_key_value_heads" in values and values["num_key_value_heads"] is None
    if explicit_null or not fields.has("num_key_value_heads"):
        return num_heads
    num_kv_heads = fields.size("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: 'num_attention_heads' {num_heads} must be a multiple of "
            f"'num_key_value_heads' {num_kv_heads}"
        )
    return num_kv_heads


def _bias(fields: Fields, rule: bool | str) -> bool:
    return rule if isinstance(rule, bool) else fields.flag(rule)


def _scales(fields: Fields, architecture: Architecture, head_dim: int) -> dict[str, float]:
    if not architecture.scaled:
        return {"attention_scale": head_dim**-0.5}
    return {
        "attention_scale": fields.number("attention_multiplier"),
        "embedding_multiplier": fields.number("embedding_multiplier"),
        "residual_multiplier": fields.number("residual_multiplier"),
        "logits_multiplier": 1.0 / fields.number("logits_scaling"),
    }


def _compression(fields: Fields) -> StoredWeights | None:
    return stored_weights(fields.get("quantization_config")) if fields.has("quantization_config") else None


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*generation.token_ids("eos_token_id"), *fields.token_ids("eos_token_id"))))
