"""The KV cache in 8 bits: twice the blocks of 16 bits, separate prefixes, and a tiny model's log-probabilities near full
precision.
"""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import ModelError
from loraplex.engine.kv_cache.tensors import kv_cache_dtype
from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import load_model
from loraplex.engine.sampling_params import SamplingParams

VOCAB = 128
PROMPTS = [list(range(3, 43)), list(range(3, 35)) + [90, 91], [7], list(range(100, 50, -1))]
MAX_LOGPROB_ERROR = 0.2


class NoAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        raise NotImplementedError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with q/k norm and grouped heads."""
    folder: Path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.1)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return str(folder)


def engine_of(path: str, kv_dtype: str) -> Engine:
    cache = CacheConfig(block_size=16, kv_bytes=1 << 20, kv_dtype=kv_dtype)
    config = EngineConfig(model=path, dtype="bfloat16", device="cpu", cache=cache)
    return Engine(load_model(config), config, NoAdapters())


def logprobs(engine: Engine) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of 8 greedy tokens per request, all in one batch."""
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
        engine.add(
            EngineRequest(
                request_id=str(index), namespace=bytes(32), prompt_token_ids=prompt, sampling=sampling
            )
        )
    answers: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    while engine.has_unfinished:
        for output in engine.step().outputs:
            assert output.logprob is not None
            index = int(output.sequence.request.request_id)
            answers[index].append((output.token_id, output.logprob.logprob))
    return answers


def test_answers_are_close_to_full_precision(path: str) -> None:
    exact, rounded = logprobs(engine_of(path, "auto")), logprobs(engine_of(path, "fp8"))
    compared = 0
    for ours, theirs in zip(rounded, exact, strict=True):
        assert len(ours) == 8
        # Up to the first other choice both continue the same text.
        for (token, logprob), (other_token, other) in zip(ours, theirs, strict=True):
            assert abs(logprob - other) < MAX_LOGPROB_ERROR
            compared += 1
            if token != other_token:
                break
    assert compared >= len(PROMPTS) * 2
    assert rounded != exact


def test_a_cached_prefix_gives_the_same_answer(path: str) -> None:
    engine = engine_of(path, "fp8")
    first = logprobs(engine)
    assert logprobs(engine) == first
    assert engine.stats().cached_prompt_tokens > 0


def test_a_pool_of_as_many_bytes_holds_twice_the_blocks(path: str) -> None:
    wide, narrow = engine_of(path, "auto"), engine_of(path, "fp8")
    assert narrow.info().num_blocks == 2 * wide.info().num_blocks
    caches = narrow.runner._kv_cache
    assert {cache.dtype for cache in caches} == {torch.float8_e4m3fn}
    assert sum(cache.nbytes for cache in caches) <= 1 << 20


def test_another_type_is_refused_by_name(path: str) -> None:
    with pytest.raises(ModelError, match="`kv_dtype` must be auto or fp8, got 'int3'"):
        engine_of(path, "int3")
    assert kv_cache_dtype("auto", torch.float16) is torch.float16
