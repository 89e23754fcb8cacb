"""A whole engine on the Triton backend equals the same engine on the torch backend: prompts in chunks next to decodes, with
rows of several adapters and of none. Interpreted on the CPU (a process of its own: the switch is read at import).

Invariant: while the Triton backend is chosen, no kernel of the torch backend may be called.
"""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.kernels import dispatch, reference
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import load_model
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.sampling.scorer import Scorer
from loraplex.engine.sampling_params import SamplingParams

pytest.importorskip("triton")

RANKS = {"first": 8, "second": 17}
# Tokens of a prompt, and its adapter; a step takes 16 tokens, so that the long ones come in chunks beside decodes.
REQUESTS = [(2, None), (28, "first"), (5, "second")]
RESPONSE_TOKENS = 3
# Windows and layers without positions; q/k norm. And the type of the cache.
CASES = [("smollm3-window", "auto"), ("qwen3", "fp8")]
OF_THE_DECODER = {
    "rms_norm_kernel",
    "rotary_kernel",
    "silu_mul_kernel",
    "decode_kernel",
    "prefill_kernel",
    "order_kernel",
    "chunk_kernel",
    "embedding_kernel",
    "shrink_tile_kernel",
    "shrink_row_kernel",
    "expand_tile_kernel",
    "expand_row_kernel",
    "expand_rms_norm_kernel",
    "expand_rotary_kernel",
    "expand_silu_mul_kernel",
}
TOLERANCES = {"auto": 1e-4, "fp8": 0.04}
"""Of log-probabilities. With a cache of 8 bits a key that lies between two values may round to the other one."""


class Tiny(Protocol):
    path: Path


class Source:
    """Adapters of every projection, drawn from their names."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def load(self, adapter: AdapterRef) -> LoraWeights:
        rank = RANKS[adapter.digest]
        generator = torch.Generator().manual_seed(rank)
        modules = {}
        for layer in range(self._config.num_layers):
            for name, (outputs, inputs) in self._config.projection_shapes().items():
                a = torch.randn(rank, inputs, generator=generator) * 0.1
                b = torch.randn(outputs, rank, generator=generator) * 0.1
                modules[f"layers.{layer}.{name}"] = LoraModule(a, b)
        return LoraWeights(adapter.digest, modules)


def answers(path: Path, kv_dtype: str) -> list[list[tuple[int, float]]]:
    """(token, log-probability) of every request's greedy response."""
    Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0")).save(str(path / "tokenizer.json"))
    config = EngineConfig(
        model=str(path),
        dtype="float32",
        device="cpu",
        cache=CacheConfig(num_blocks=64, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )
    engine = Engine(load_model(config), config, Source(load_model_config(str(path))))
    for index, (tokens, adapter) in enumerate(REQUESTS):
        known = AdapterRef(namespace=bytes(32), digest=adapter, blob_path="") if adapter else None
        engine.add(
            EngineRequest(
                request_id=str(index),
                namespace=bytes(32),
                prompt_token_ids=[3 + (17 * index + 5 * i) % 120 for i in range(tokens)],
                adapter=known,
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=RESPONSE_TOKENS, ignore_eos=True, logprobs=0
                ),
            )
        )
    found: list[list[tuple[int, float]]] = [[] for _ in REQUESTS]
    while engine.has_unfinished:
        for output in engine.step().outputs:
            assert output.logprob is not None
            found[int(output.sequence.request.request_id)].append((output.token_id, output.logprob.logprob))
    return found


def forbid_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public function of `kernels/reference/` raises."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a torch body was called in place of the Triton body")

    for module in pkgutil.iter_modules(reference.__path__, f"{reference.__name__}."):
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            if getattr(value, "__module__", None) == module.name and not name.startswith("_"):
                monkeypatch.setattr(loaded, name, forbidden)


def count_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    from triton.runtime.interpreter import GridExecutor

    launched: Counter[str] = Counter()
    run = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        launched[self.fn.__name__] += 1
        run(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return launched


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")
@pytest.mark.parametrize(("case", "kv_dtype"), CASES)
def test_the_triton_backend_gives_the_tokens_of_torch(
    case: str, kv_dtype: str, tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(case).path
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.REFERENCE)
    expected = answers(path, kv_dtype)
    monkeypatch.setattr(dispatch, "_cpu_backend", lambda: dispatch.KernelBackend.TRITON)
    forbid_torch_backend(monkeypatch)
    launched = count_kernels(monkeypatch)
    warm_up = Scorer.warm_up
    monkeypatch.setattr(
        Scorer, "warm_up", lambda self, rows: (launched.update(["head"]), warm_up(self, rows))
    )
    for ours, theirs in zip(answers(path, kv_dtype), expected, strict=True):
        assert len(ours) == RESPONSE_TOKENS
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [logprob for _, logprob in ours] == pytest.approx(
            [logprob for _, logprob in theirs], abs=TOLERANCES[kv_dtype]
        )
    assert set(launched) >= OF_THE_DECODER
    layers = load_model_config(str(path)).num_layers
    norms = launched["rms_norm_kernel"] + launched["expand_rms_norm_kernel"]
    rotaries = launched["rotary_kernel"] + launched["expand_rotary_kernel"]
    norms -= launched["head"]
    # A step that samples nothing ends before the last norm.
    assert 2 * rotaries < norms <= 2 * rotaries + rotaries / layers


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=20)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == len(CASES)
