"""The largest adapter of a model, written as PEFT does, has the size by which uploads are bounded."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from loraplex.adapters.target_modules import adaptable_modules, max_weights_bytes
from loraplex.adapters.validation.tensor_names import PREFIX
from loraplex.engine.models.config import ModelConfig

RANK, MAX_HEADER_BYTES = 16, 1 << 16


def test_the_bound_is_that_of_the_largest_adapter(model_config: ModelConfig, tmp_path: Path) -> None:
    modules = adaptable_modules(model_config)
    tensors = {}
    for path, module in modules.items():
        halves = ("lora_embedding_A", "lora_embedding_B") if module.is_embedding else ("lora_A", "lora_B")
        tensors[f"{PREFIX}{path}.{halves[0]}"] = np.ones((RANK, module.in_features), np.float32)
        tensors[f"{PREFIX}{path}.{halves[1]}"] = np.ones((module.out_features, RANK), np.float32)
        if module.layer is None:
            shape = (module.in_features, module.out_features)
            tensors[f"{PREFIX}{path}.base_layer.weight"] = np.ones(shape, np.float32)
    save_file(tensors, tmp_path / "largest")
    bound = max_weights_bytes(modules.values(), RANK, MAX_HEADER_BYTES)
    assert bound - MAX_HEADER_BYTES < (tmp_path / "largest").stat().st_size <= bound
