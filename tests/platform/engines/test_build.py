"""A started engine reports planned and measured memory, within 2 % of each other."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef
from loraplex.engine.model_loading import load_model
from loraplex.platform.engines.build import report_memory


class NoAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        raise AdapterLoadFailed("none here")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, EngineConfig]:
    folder: Path = tmp_path_factory.mktemp("small")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(256)}, unk_token="<0>")).save(
        str(folder / "tokenizer.json")
    )
    settings = EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        quantization="int8",
        cache=CacheConfig(kv_bytes=1 << 20),
    )
    engine = Engine(load_model(settings), settings, NoAdapters())
    engine.close()
    return engine, settings


def test_without_a_terminal_the_log_has_the_whole_worksheet(started: tuple[Engine, EngineConfig]) -> None:
    stages: list[str] = []
    with capture_logs() as logs:
        report_memory(*started, stages.append, on_terminal=False)
    (event,) = logs
    assert not stages
    assert event["event"] == "memory" and event["log_level"] == "info"
    measured = event["measured"]
    assert measured["weights"] == pytest.approx(event["weights_bytes"], rel=0.02)
    assert measured["KV cache"] == pytest.approx(event["kv_cache_bytes"], rel=0.02)
    assert {weight["format"] for weight in event["weights"]} == {"float32", "int8"}


def test_on_a_terminal_one_stage_line_has_the_sums(started: tuple[Engine, EngineConfig]) -> None:
    stages: list[str] = []
    with capture_logs() as logs:
        report_memory(*started, stages.append, on_terminal=True)
    assert not logs
    (line,) = stages
    for words in ("planned", "adapters", "measured: weights", "KV cache 1.05 MB", "rows of"):
        assert words in line
