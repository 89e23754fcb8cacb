"""A `LocalEngine` with a model of one layer, with and without a step ahead of the results."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch
from tests.engine.local_engine.engine_requests import VOCAB
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import (
    AdapterRef,
)
from loraplex.engine.model_loading import LoadedModel, load_model


class Source:
    """Knows no adapter. A load waits for `gate`, so that a test can look at a request while it waits."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Event()

    def load(self, adapter: AdapterRef) -> LoraWeights:
        self.asked.set()
        self.gate.wait(60)
        raise AdapterLoadFailed(f"no adapter {adapter.digest}")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("local-engine")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    # One word per token, joined without spaces, so that a stop string may span tokens.
    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    cache = CacheConfig(block_size=8, num_blocks=600)
    return EngineConfig(model=str(folder), dtype="float32", device="cpu", cache=cache)


@pytest.fixture(scope="module")
def model(settings: EngineConfig) -> LoadedModel:
    return load_model(settings)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture(params=["off", "on"])
def core(
    request: pytest.FixtureRequest, model: LoadedModel, settings: EngineConfig, source: Source
) -> Engine:
    """With a step ahead of the results, and without."""
    return Engine(model, replace(settings, scheduler=SchedulerConfig(overlap=request.param)), source)


@pytest.fixture
async def engine(core: Engine, source: Source) -> AsyncIterator[LocalEngine]:
    local = LocalEngine(core)
    yield local
    source.gate.set()
    await local.close()
