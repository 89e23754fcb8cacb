"""A tiny model, and adapters for it as PEFT itself writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.models.config import ModelConfig

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 40, 16, 24, 2, 4, 2

PeftFactory = Callable[..., tuple[PeftModel, Path]]


@pytest.fixture
def model_config() -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        uses_rope=(True,) * LAYERS,
        sliding_window=(None,) * LAYERS,
        attention_scale=(HIDDEN // HEADS) ** -0.5,
        hf_config={},
        eos_token_ids=(2,),
    )


@pytest.fixture
def peft_adapter(tmp_path: Path) -> PeftFactory:
    """Create an adapter with random A and B for a tiny Llama and save it as PEFT does: (model, folder)."""

    def make(name: str = "adapter", tie: bool = False, **settings: Any) -> tuple[PeftModel, Path]:
        torch.manual_seed(len(name))
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                intermediate_size=INTERMEDIATE,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                tie_word_embeddings=tie,
            )
        )
        model = get_peft_model(base, LoraConfig(**{"task_type": "CAUSAL_LM", **settings}))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_()
        folder = tmp_path / name
        model.save_pretrained(str(folder))
        return model, folder

    return make
