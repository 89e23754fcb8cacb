"""The metadata of a GGUF file as a config.json (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), without torch.

Invariant: a rope scaling that cannot be reproduced exactly is refused, not dropped.
"""

from pathlib import Path
from typing import Any

from loraplex.engine.errors import ModelError, UnsupportedArchitecture

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` over the memory-mapped file. Raises `ModelError`."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from error


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the equivalent of config.json. Raises `UnsupportedArchitecture` or `ModelError`."""
    reader = open_gguf(path)
    kind = gguf_architecture(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "num_key_value_heads": _value(reader, f"{kind}.attention.head_count_kv"),
        "rope_parameters": _rope_parameters(reader, kind, tensors),
        "eos_token_id": _eos_token_ids(reader),
    }
    for key, name in _REQUIRED.items():
        config[name] = _value(reader, f"{kind}.{key}")
    config["head_dim"] = _value(reader, f"{kind}.attention.key_length") or _equal_share(config)
    return config


def _equal_share(config: dict[str, Any]) -> int | None:
    """Head size for a header that does not state it. None if unknown: the check of the missing field then reports the
    error.
    """
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    return hidden_size // num_heads if hidden_size and num_heads else None


def gguf_architecture(reader: Any) -> str:
    """`general.architecture`. Raises `UnsupportedArchitecture`."""
    kind = _value(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"GGUF architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return str(kind)


def _rope_parameters(reader: Any, kind: str, tensors: dict[str, Any]) -> dict[str, Any]:
    theta = _value(reader, f"{kind}.rope.freq_base")
    base = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
    scaling = _value(reader, f"{kind}.rope.scaling.type")
    if ROPE_FACTORS in tensors and scaling in (None, "none"):
        # Llama 3 stores the divisor of each frequency. LongRoPE with equal short and long factors computes the
        # same.
        factors = [float(factor) for factor in tensors[ROPE_FACTORS].data]
        return base | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": _value(reader, f"{kind}.context_length"),
        }
    if scaling == "linear":
        return base | {"rope_type": "linear", "factor": _value(reader, f"{kind}.rope.scaling.factor")}
    if scaling not in (None, "none"):
        raise ModelError(f"GGUF field '{kind}.rope.scaling.type' must be 'none' or 'linear', got {scaling!r}")
    return base


def _eos_token_ids(reader: Any) -> list[int]:
    values = (_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return [int(value) for value in values if value is not None]


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
