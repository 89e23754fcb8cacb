"""A folder that passes every check, of the smallest model: what bad uploads and life cycles begin with."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from loraplex.adapters.limits import AdapterLimits
from loraplex.engine.models.config import ModelConfig

HIDDEN, LAYERS, VOCAB, RANK = 16, 2, 40, 4
LIMITS = AdapterLimits(max_weights_bytes=64 << 20)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"
A, B = (f"{PREFIX}.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HIDDEN // 4,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    uses_rope=(True,) * LAYERS,
    sliding_window=(None,) * LAYERS,
    attention_scale=0.5,
    hf_config={},
    eos_token_ids=(2,),
)

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Header = dict[str, dict[str, Any]]


def values(*shape: int, value: float = 0.5) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", shape, struct.pack("<f", value) * math.prod(shape)


def good_tensors() -> Tensors:
    """Rank 4 on q_proj of both layers."""
    tensors: Tensors = {}
    for layer in range(LAYERS):
        path = f"{PREFIX}.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_A.weight"] = values(RANK, HIDDEN)
        tensors[f"{path}.lora_B.weight"] = values(HIDDEN, RANK)
    return tensors


def good_config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "../../etc/passwd",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def header_of(tensors: Tensors) -> tuple[Header, bytes]:
    header: Header = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += content
    return header, data


def write_file(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def write_good(folder: Path) -> None:
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(good_config()))
    write_file(folder, *header_of(good_tensors()))
