"""The supported architectures as data: what each adds to the plain Llama decoder, so that the decoder has no branch per model.

Invariant: `defaults` are what `transformers` assumes for keys absent from config.json; a test compares the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from loraplex.engine.errors import UnsupportedArchitecture
from loraplex.engine.models.config_fields import Fields

LayerWindows: TypeAlias = tuple[int | None, ...]


def no_windows(fields: Fields, num_layers: int) -> LayerWindows:
    return (None,) * num_layers


def one_window(fields: Fields, num_layers: int) -> LayerWindows:
    """Mistral, Phi-3: one window for all layers, if any."""
    window = fields.size("sliding_window") if fields.has("sliding_window") else None
    return (window,) * num_layers


def typed_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Ministral: `layer_types` names the layers with a window; without it, all layers have it."""
    if not fields.has("layer_types"):
        return one_window(fields, num_layers)
    window = fields.size("sliding_window") if fields.has("sliding_window") else None
    layer_types = fields.listing("layer_types", num_layers)
    if not set(layer_types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", "a list of 'full_attention' and 'sliding_attention'")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def late_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Qwen: only with `use_sliding_window`; by default from layer `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return no_windows(fields, num_layers)
    if fields.has("layer_types"):
        return typed_windows(fields, num_layers)
    window, first = fields.size("sliding_window"), fields.size("max_window_layers")
    return tuple(window if layer >= first else None for layer in range(num_layers))


def nope_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """SmolLM3: only with `use_sliding_window`; by default on the layers without rotary positions."""
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return no_windows(fields, num_layers)
    if fields.has("layer_types"):
        return typed_windows(fields, num_layers)
    window = fields.size("sliding_window")
    return tuple(None if rotates else window for rotates in interval_rope(fields, num_layers))


def rope_everywhere(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


def interval_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """SmolLM3: `no_rope_layers` (1 rotates, 0 does not), else every `no_rope_layer_interval`-th layer does not."""
    if fields.has("no_rope_layers"):
        return tuple(bool(rotates) for rotates in fields.listing("no_rope_layers", num_layers))
    interval = fields.size("no_rope_layer_interval")
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture. A bias is a constant, or the name of the config field that sets it.

    `fused`: the checkpoint stores qkv_proj and gate_up_proj as one tensor each. `scaled` (Granite): the four multipliers
    are read from the configuration.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    fused: bool = False
    scaled: bool = False
    windows: Callable[[Fields, int], LayerWindows] = no_windows
    rope_layers: Callable[[Fields, int], tuple[bool, ...]] = rope_everywhere


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = _COMMON | {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GRANITE_SCALES = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_MISTRAL = _COMMON | {"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2}

ARCHITECTURES: Mapping[str, Architecture] = {
    "GraniteForCausalLM": Architecture(
        model_type="granite",
        defaults=_COMMON | _GRANITE_SCALES | {"eos_token_id": 2},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        scaled=True,
    ),
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        defaults=_COMMON | {"eos_token_id": 2},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "MinistralForCausalLM": Architecture(model_type="ministral", defaults=_MISTRAL, windows=typed_windows),
    "MistralForCausalLM": Architecture(model_type="mistral", defaults=_MISTRAL, windows=one_window),
    "Phi3ForCausalLM": Architecture(
        model_type="phi3",
        defaults=_COMMON | {"rms_norm_eps": 1e-5, "eos_token_id": 32000},
        fused=True,
        windows=one_window,
    ),
    "Qwen2ForCausalLM": Architecture(model_type="qwen2", defaults=_QWEN, qkv_bias=True, windows=late_windows),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        defaults=_QWEN | {"head_dim": 128},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows=late_windows,
    ),
    "SeedOssForCausalLM": Architecture(
        model_type="seed_oss",
        defaults=_COMMON
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "eos_token_id": 2},
        qkv_bias="attention_bias",
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    "SmolLM3ForCausalLM": Architecture(
        model_type="smollm3",
        defaults=_COMMON
        | {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
        },
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=nope_windows,
        rope_layers=interval_rope,
    ),
}


def architecture_of(values: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return name and record for a config.json. Raises `UnsupportedArchitecture`, listing what is supported."""
    named = values.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    record = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if record is None or not isinstance(name, str) or values.get("model_type") != record.model_type:
        raise UnsupportedArchitecture(
            f"architectures {named!r} with model_type {values.get('model_type')!r} is not supported; supported: "
            + ", ".join(f"{known} ({entry.model_type})" for known, entry in ARCHITECTURES.items())
        )
    return name, record
