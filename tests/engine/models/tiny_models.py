"""Small random checkpoints of every supported architecture, made by `transformers` once per session.

Invariant: weights, norms and biases are spread widely enough that a mistake anywhere moves the logits.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

GEOMETRY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.5 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}

# name -> (architecture, what differs from GEOMETRY)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
        },
    ),
    "llama": ("Llama", {}),
    "llama-biased-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-multi-head": ("Llama", {"num_key_value_heads": 4}),
    "llama-wide-head": ("Llama", {"head_dim": 32}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "ministral": (
        "Ministral",
        {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 48}),
    "phi3": ("Phi3", {}),
    "phi3-longrope-long": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi3-longrope-short": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "sliding_window": 100,
        },
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-window": (
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A checkpoint on disk. `reference` is `transformers`' model over it, fp32, eager attention."""

    name: str
    path: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits of the whole prompt, fp32 [tokens, vocabulary], computed at once without a cache."""
        with torch.no_grad():
            output = self.reference(torch.tensor([token_ids]), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits


def make_model(architecture: str, changes: dict[str, Any]) -> Any:
    """A `transformers` model in fp32 with random weights from a fixed seed."""
    config = getattr(transformers, f"{architecture}Config")(**copy.deepcopy(GEOMETRY | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * spread if "norm" in name else 0.15 * spread)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes the named case of `CASES` once and returns it ever after."""
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = make_model(*CASES[name])
            model.save_pretrained(folder)
            made[name] = TinyModel(name, folder, model)
        return made[name]

    return get


@pytest.fixture(params=sorted(CASES))
def tiny_model(request: pytest.FixtureRequest, tiny: Callable[[str], TinyModel]) -> TinyModel:
    """Every case in turn."""
    return tiny(request.param)


@pytest.fixture
def llama_model(tiny: Callable[[str], TinyModel]) -> TinyModel:
    return tiny("llama")


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """200 random token ids of the tiny vocabulary."""
    ids: list[int] = torch.randint(3, 128, (200,), generator=torch.Generator().manual_seed(3)).tolist()
    return ids
