"""Adapters of random weights in PEFT's format, over all seven projections: what a benchmark serves.

Invariant: a function of (model, rank, seed); the scale is 1 and no answer becomes non-finite.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from loraplex.engine.models.config import ModelConfig

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
B_DEVIATION = 0.02


def write_random_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> Path:
    """PEFT's two files in `folder`, float16; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float16]] = {}
    for layer in range(model.num_layers):
        for name, (outputs, inputs) in model.projection_shapes().items():
            block = "self_attn" if name in ATTENTION else "mlp"
            path = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{path}.lora_A.weight"] = _normal(generator, rank, inputs, inputs**-0.5)
            tensors[f"{path}.lora_B.weight"] = _normal(generator, outputs, rank, B_DEVIATION)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(model.projection_shapes()),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapter_parameters(model: ModelConfig, rank: int) -> int:
    """How many numbers such an adapter holds."""
    shapes = model.projection_shapes().values()
    return model.num_layers * rank * sum(outputs + inputs for outputs, inputs in shapes)


def _normal(generator: np.random.Generator, rows: int, columns: int, deviation: float) -> NDArray[np.float16]:
    drawn = generator.standard_normal((rows, columns), dtype=np.float32)
    return (drawn * np.float32(deviation)).astype(np.float16)
