"""A small model with tied embeddings whose inputs vary together, as real ones do."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.model_loading import LoadedModel, load_model

VOCAB = 96


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unquantized")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.fixture(scope="session")
def base(base_folder: Path) -> LoadedModel:
    settings = EngineConfig(
        model=str(base_folder), dtype="float32", device="cpu", cache=CacheConfig(num_blocks=64)
    )
    return load_model(settings)
