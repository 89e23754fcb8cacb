"""The engine on a GPU: replayed and overlapped steps against plain ones, and no step that waits for the device
unnecessarily.
"""

import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.gpu.scripted_masks import FORCED, MASKED, scripted_masks
from tests.engine.random_llama import save_random_llama

from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, ProbeReport, TokenLogprob
from loraplex.engine.model_loading import load_model
from loraplex.engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
VOCAB, HIDDEN = 512, 256
CLOSE = 0.15
"""Of log-probabilities in bfloat16 whose sums were taken in another order."""

ADAPTERS = tuple(f"a{i}" for i in range(12))
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 5, "logit_bias": {7: 2.0}},
)


class RandomAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        generator = torch.Generator().manual_seed(sum(adapter.digest.encode()))
        a, b = (torch.randn(shape, generator=generator) * 0.2 for shape in ((16, HIDDEN), (HIDDEN, 16)))
        return LoraWeights(adapter.digest, {f"layers.{i}.o_proj": LoraModule(a, b) for i in range(2)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda")
    save_random_llama(
        path,
        std=0.1,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return path


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device but an event that is waited for by name raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def request(
    request_id: str,
    prompt: list[int],
    adapter: str | None,
    sampling: dict[str, Any],
    grammar: bytes | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        namespace=bytes(32),
        prompt_token_ids=prompt,
        sampling=SamplingParams(ignore_eos=True, **sampling),
        adapter=AdapterRef(namespace=bytes(32), digest=adapter, blob_path="") if adapter else None,
        grammar=grammar,
    )


def run(engine: Engine) -> dict[str, list[int]]:
    """Tokens by request."""
    found: dict[str, list[int]] = {}
    while engine.has_unfinished:
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            found.setdefault(output.sequence.request_id, []).append(output.token_id)
    return found


def answers(folder: Path, *, overlap: str, cuda_graphs: str) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device=DEVICE,
        cuda_graphs=cuda_graphs,
        deterministic=True,
        cache=CacheConfig(block_size=16, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64, overlap=overlap),
    )
    engine = Engine(load_model(config), config, RandomAdapters())
    for name in ADAPTERS:
        engine.add(request(name, [5], name, {"max_tokens": 1}))
    # Loads have a thread of their own, and the first run of a kernel compiles it: neither is a step's business.
    run(engine)
    choose = random.Random(1)
    for index in range(60):
        prompt = [choose.randrange(3, VOCAB) for _ in range(choose.randrange(1, 90))]
        sampling = {"max_tokens": 40, "seed": index} | SAMPLINGS[index % len(SAMPLINGS)]
        engine.add(request(str(index), prompt, choose.choice([None, *ADAPTERS]), sampling))
    with no_waiting():
        found = run(engine)
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    engine.close()
    return found


def test_replayed_and_overlapped_steps_change_no_token(folder: Path) -> None:
    plain = answers(folder, overlap="off", cuda_graphs="off")
    assert len(plain) == 60 and all(len(tokens) == 40 for tokens in plain.values())
    assert answers(folder, overlap="on", cuda_graphs="off") == plain
    assert answers(folder, overlap="off", cuda_graphs="auto") == plain
    assert answers(folder, overlap="on", cuda_graphs="auto") == plain


def with_masks(folder: Path, *, cuda_graphs: str) -> dict[str, list[int]]:
    """Rows with masks, some with forced tokens, among free ones, whose prompts arrive while others decode."""
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device=DEVICE,
        cuda_graphs=cuda_graphs,
        deterministic=True,
        cache=CacheConfig(block_size=16, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64),
        grammar=GrammarConfig(mask_timeout_s=60.0),
    )
    engine = Engine(load_model(config), config, RandomAdapters(), mask_factory=scripted_masks(VOCAB))
    for index in range(30):
        grammar = (None, MASKED, FORCED)[index % 3]
        sampling = {"max_tokens": 30, "seed": index} | SAMPLINGS[index % 4]
        engine.add(request(str(index), [3 + index] * (index + 1), None, sampling, grammar))
    found = run(engine)
    engine.close()
    return found


def test_replayed_steps_with_masks_and_forced_tokens_change_no_token(folder: Path) -> None:
    plain = with_masks(folder, cuda_graphs="off")
    assert len(plain) == 30 and all(len(tokens) == 30 for tokens in plain.values())
    assert all(token % 2 == 0 for index in range(30) if index % 3 for token in plain[str(index)])
    assert with_masks(folder, cuda_graphs="auto") == plain


def log_probabilities(folder: Path, *, cuda_graphs: str) -> dict[str, list[TokenLogprob]]:
    """Of greedy rows with adapters, `deterministic` off."""
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device=DEVICE,
        cuda_graphs=cuda_graphs,
        cache=CacheConfig(block_size=16, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64),
    )
    engine = Engine(load_model(config), config, RandomAdapters())
    choose = random.Random(2)
    for index in range(40):
        prompt = [choose.randrange(3, VOCAB) for _ in range(choose.randrange(1, 90))]
        sampling = {"max_tokens": 20, "temperature": 0.0, "logprobs": 0}
        engine.add(request(str(index), prompt, choose.choice([None, *ADAPTERS]), sampling))
    found: dict[str, list[TokenLogprob]] = {}
    while engine.has_unfinished:
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            assert output.logprob is not None
            found.setdefault(output.sequence.request_id, []).append(output.logprob)
    engine.close()
    return found


def test_replayed_steps_that_are_not_deterministic_stay_close(folder: Path) -> None:
    """Until two tokens are about as likely as each other, after which the texts go their own ways."""
    plain = log_probabilities(folder, cuda_graphs="off")
    replayed = log_probabilities(folder, cuda_graphs="auto")
    assert plain.keys() == replayed.keys() and len(plain) == 40
    for name, tokens in plain.items():
        pairs = list(zip(tokens, replayed[name], strict=True))
        same = list(takewhile(lambda pair: pair[0].token_id == pair[1].token_id, pairs))
        # The first pair that differs was sampled from the same text, too.
        for one, other in pairs[: len(same) + 1]:
            assert abs(one.logprob - other.logprob) < CLOSE


def test_an_adapter_is_probed_beside_rows(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device=DEVICE,
        cache=CacheConfig(block_size=16, num_blocks=400),
        scheduler=SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=64),
    )
    engine = Engine(load_model(config), config, RandomAdapters())
    adapter = AdapterRef(namespace=bytes(32), digest="a0", blob_path="")
    for attempt in range(2):
        done: Future[ProbeReport] = Future()
        engine.numeric_check.start(adapter, done)
        engine.add(request(f"beside {attempt}", [5, 6, 7], "a1", {"max_tokens": 40, "temperature": 0.0}))
        while not done.done():
            engine.step()
        report = done.result()
        assert report.modules == 2 and report.finite and report.effect > 0
        assert report.max_error.keys() == {"o_proj"} and report.max_error["o_proj"] < report.bound
        run(engine)
    assert engine.adapters.num_pinned == 0
    engine.close()
