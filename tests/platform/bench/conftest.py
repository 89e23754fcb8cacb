"""A tiny model on disk, complete: configuration, random weights and tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(chat_tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder
