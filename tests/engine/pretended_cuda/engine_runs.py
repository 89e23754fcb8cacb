"""A tiny engine's requests on the pretended device and on the CPU: the same settings, the same tokens.

Invariant: both sides have the same weights. Where the CPU rounds activations and a GPU does not, the CPU gets the dequantized
weights in float32.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tests.benchmarks.gpu.scripted_masks import FORCED, MASKED, scripted_masks
from tests.engine.random_llama import save_random_llama

from loraplex.engine.batch.step_plan import NO_TOKEN
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.config import CacheConfig, EngineConfig, GrammarConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest, ScoreRequest
from loraplex.engine.model_loading import load_model
from loraplex.engine.models.parameters import decoder_parameters
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, dequantize
from loraplex.engine.quantization.scheme import quantize_parameter
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.sequence_scores import SequenceScores

VOCAB, HIDDEN, INTERMEDIATE, RANK = 128, 64, 128, 8
TOKENS = 8
REQUESTS = 3
MAX_PROMPT = 16
BLOCK = 16
LONG_PROMPT = BLOCK - 2
"""Fits a block, and the response does not."""
BROKEN = "broken"
"""The digest of an adapter whose results are not finite."""
HUGE = 1e30
"""Its square is not finite."""
ADAPTER_VALUES = RANK * (17 * HIDDEN + 2 * VOCAB)
"""Of one adapter, roughly."""
WEIGHTS_FILE = "model.safetensors"
PERTURBATION = 3e-4
PERTURBED_MODELS = 4
IDLE_S = 0.001
LIMIT_S = 240.0

WEIGHTS = ("none", "int8", "int4", "fp8 kv")
ADAPTERS = ("0", "1", "10", "10 int8")
STEPS = ("graphs", "eager")
SAMPLINGS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "masks": ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 50}),
    "forced tokens": ({"temperature": 0.0},),
    "sampled": (
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 2.0, "top_p": 0.99, "top_k": 100, "min_p": 0.01},
        {"temperature": 0.0, "min_tokens": 5, "logit_bias": {7: 2.0}},
    ),
    "penalties": (
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "presence_penalty": -1.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "frequency_penalty": -1.0, "presence_penalty": 1.0, "repetition_penalty": 0.7},
    ),
    "logprobs": ({"temperature": 0.0, "logprobs": 2}, {"temperature": 1.0, "logprobs": 0}),
}
GRAMMARS = {"masks": (None, MASKED), "forced tokens": (FORCED, None)}
EVENTS = ("cancel", "preemption", "eviction", "quarantine")


@dataclass(frozen=True, slots=True)
class Settings:
    """One value of each factor; `event` is what happens beside the rows."""

    weights: str
    adapters: str
    steps: str
    sampling: str
    event: str

    @property
    def scheme(self) -> str:
        """Of the weights; fp8 is the cache's type alone."""
        return "none" if self.weights == "fp8 kv" else self.weights

    @property
    def num_adapters(self) -> int:
        return int(self.adapters.split()[0])

    @property
    def rows(self) -> int:
        """More adapters than `FEW_ADAPTERS` can be in one step, where there are so many."""
        return max(3, self.num_adapters)

    def adapter_bytes(self, device: str) -> int:
        """Room for all adapters, or for less than half of them. The CPU keeps 8-bit pages in float32."""
        adapters = 4 if self.event == "eviction" else 12
        bytes_per_value = 1 if self.adapters.endswith("int8") and device == "cuda" else 4
        return adapters * ADAPTER_VALUES * bytes_per_value if self.num_adapters else 0

    @property
    def num_blocks(self) -> int:
        """Room for all rows, or for half of what they grow to."""
        return max(3, self.rows // 2) if self.event == "preemption" else 40


@dataclass(slots=True)
class Answers:
    """Tokens, scores and errors by request, and what shows that the event happened."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    happened: bool = True
    replayed: int = 0


class RandomAdapters:
    """An adapter is what its digest says; it acts on every kind of site."""

    def load(self, adapter: AdapterRef) -> LoraWeights:
        generator = torch.Generator().manual_seed(sum(adapter.digest.encode()))

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator) * 0.3

        shapes = {"lm_head": (HIDDEN, VOCAB), "embed_tokens": (VOCAB, HIDDEN)}
        for layer in range(2):
            shapes |= {f"layers.{layer}.q_proj": (HIDDEN, HIDDEN), f"layers.{layer}.o_proj": (HIDDEN, HIDDEN)}
            shapes |= {f"layers.{layer}.down_proj": (INTERMEDIATE, HIDDEN)}
        shapes["layers.0.up_proj"] = (HIDDEN, INTERMEDIATE)
        modules = {
            name: LoraModule(drawn(RANK, inputs), drawn(outputs, RANK))
            for name, (inputs, outputs) in shapes.items()
        }
        if adapter.digest == BROKEN:
            modules["lm_head"].a[:] = HUGE
            modules["lm_head"].b[:] = HUGE
        return LoraWeights(adapter.digest, modules)


def save_tiny_model(folder: Path) -> None:
    """A random Llama of two layers in float32."""
    save_random_llama(
        folder,
        std=0.15,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )


def _save_changed(folder: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same model with every tensor of the file changed."""
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    stored = {name: change(weight) for name, weight in load_file(folder / WEIGHTS_FILE).items()}
    save_file(stored, target / WEIGHTS_FILE, {"format": "pt"})


def _moved(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return weight * (1 + PERTURBATION * torch.randn(weight.shape, generator=generator))


def _save_dequantized(folder: Path, target: Path, scheme: str) -> None:
    """The same model with every weight rounded as `scheme` does, in float32."""
    _save_changed(folder, target, torch.Tensor.clone)
    stored = load_file(target / WEIGHTS_FILE)
    for parameter in decoder_parameters(load_model_config(str(folder))):
        parts = [stored[part.source] for part in parameter.parts]
        weight = quantize_parameter(parameter.name, torch.cat(parts), scheme)
        if isinstance(weight, QuantizedWeight):
            pieces = torch.split(dequantize(weight), [len(part) for part in parts])
            for part, piece in zip(parameter.parts, pieces, strict=True):
                stored[part.source] = piece.clone()
    save_file(stored, target / WEIGHTS_FILE, {"format": "pt"})


def on_cpu(folder: Path, settings: Settings) -> Answers:
    """What the CPU engine answers."""
    path = folder
    if settings.scheme != "none":
        path = folder.with_name(f"{folder.name}-{settings.scheme}")
        if not path.exists():
            _save_dequantized(folder, path, settings.scheme)
    return _answers(config_of(path, settings, "cpu", "none"), settings, lambda: None)


def decided(folder: Path, settings: Settings, expected: Answers) -> dict[str, int]:
    """How many of each request's tokens stay the same when every weight moves by `PERTURBATION` of itself.

    A sum in another order moves a key that lies between two values of fp8, and that one the tokens that hardly differ.
    """
    counts = {name: len(tokens) for name, tokens in expected.tokens.items()}
    for seed in range(PERTURBED_MODELS):
        path = folder.with_name(f"{folder.name}-moved-{seed}")
        if not path.exists():
            generator = torch.Generator().manual_seed(seed)
            _save_changed(folder, path, partial(_moved, generator=generator))
        other = _answers(config_of(path, settings, "cpu", "none"), settings, lambda: None)
        for name, tokens in expected.tokens.items():
            pairs = zip(tokens, other.tokens.get(name, ()), strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            counts[name] = min(counts[name], same)
    return counts


def on_device(folder: Path, settings: Settings, started: Callable[[], None] = lambda: None) -> Answers:
    """What the engine answers on the pretended device. `started` is called before the first step."""
    return _answers(config_of(folder, settings, "cuda", settings.scheme), settings, started)


def config_of(path: Path, settings: Settings, device: str, scheme: str) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        dtype="float32",
        device=device,
        quantization=scheme,
        cuda_graphs="auto" if settings.steps == "graphs" and device == "cuda" else "off",
        max_model_len=2 * BLOCK,
        cache=CacheConfig(
            block_size=BLOCK,
            num_blocks=settings.num_blocks,
            kv_dtype="fp8" if settings.weights == "fp8 kv" else "auto",
        ),
        lora=LoraConfig(
            max_bytes=settings.adapter_bytes(device),
            host_max_bytes=1 << 20,
            page_dtype="int8" if settings.adapters.endswith("int8") else "auto",
            quarantine_after=1,
        ),
        grammar=GrammarConfig(mask_timeout_s=LIMIT_S),
        scheduler=SchedulerConfig(max_num_seqs=settings.rows, max_num_batched_tokens=settings.rows + 2),
    )


def _answers(config: EngineConfig, settings: Settings, started: Callable[[], None]) -> Answers:
    engine = Engine(load_model(config), config, RandomAdapters(), mask_factory=scripted_masks(VOCAB))
    found = Answers()
    started()
    try:
        names = [f"a{index}" for index in range(settings.num_adapters)]
        for request in _requests(settings, names):
            engine.add(request)
        _run(engine, found, cancels=settings.event == "cancel")
        stats = engine.stats()
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        assert stats.pinned_adapters == 0
        found.happened = bool(
            {
                "cancel": stats.aborted_requests,
                "preemption": stats.preemptions,
                "eviction": stats.adapter_evictions,
                "quarantine": stats.quarantined_adapters,
            }[settings.event]
        )
        graphs = engine.runner._graphs
        found.replayed = 0 if graphs is None else graphs.num_replayed
    finally:
        engine.close()
    return found


def _requests(settings: Settings, names: list[str]) -> list[EngineRequest]:
    """Requests of one sampling, whose rows take turns of the adapters and the base model."""
    choose = random.Random(repr(settings))
    samplings = SAMPLINGS[settings.sampling]
    grammars = GRAMMARS.get(settings.sampling, (None,))
    adapters: list[str | None] = [*names, None]
    found = []
    for index in range(max(REQUESTS, len(names))):
        length = LONG_PROMPT if settings.event == "preemption" else choose.randrange(1, MAX_PROMPT)
        prompt = [choose.randrange(3, VOCAB) for _ in range(length)]
        sampling = {"max_tokens": TOKENS, "seed": index, "ignore_eos": True} | samplings[
            index % len(samplings)
        ]
        found.append(
            request_of(
                str(index), prompt, adapters[index % len(adapters)], sampling, grammars[index % len(grammars)]
            )
        )
    if settings.sampling == "logprobs":
        found += _scoring(choose, adapters)
    if settings.event == "quarantine":
        greedy = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
        found.insert(1, request_of(BROKEN, [5, 6, 7], BROKEN, greedy, None))
    return found


def _scoring(choose: random.Random, adapters: list[str | None]) -> list[EngineRequest]:
    """A prompt longer than a step, with text and without, and continuations of one."""
    prompt = [choose.randrange(3, VOCAB) for _ in range(LONG_PROMPT)]
    ahead = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    continuations = ScoreRequest(continuations=[[9], [9, 8, 7]], ending_ids=[1])
    return [
        replace(request_of(name, prompt, adapter, sampling, None), scores=scores)
        for adapter in dict.fromkeys((adapters[0], None))
        for name, sampling, scores in (
            (f"scored {adapter}", {"max_tokens": 0}, ScoreRequest(prompt_logprobs=3)),
            (f"echoed {adapter}", ahead, ScoreRequest(prompt_logprobs=0, token_ids={13: [5, 6]})),
            (f"continued {adapter}", {"max_tokens": 0, "n": 2}, continuations),
        )
    ]


def _values(scores: SequenceScores) -> list[float]:
    """All log-probabilities of a choice."""
    prompt = [value for each in scores.prompt or () for value in (each.logprob, *(v for _, v in each.top))]
    return [*prompt, *(value for values in scores.token_ids.values() for value in values)]


def request_of(
    name: str, prompt: list[int], adapter: str | None, sampling: dict[str, Any], grammar: bytes | None
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        namespace=bytes(32),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        adapter=adapter_ref(adapter) if adapter else None,
        grammar=grammar,
    )


def adapter_ref(digest: str) -> AdapterRef:
    """The adapter that this digest describes."""
    return AdapterRef(namespace=bytes(32), digest=digest, blob_path="")


def _run(engine: Engine, found: Answers, *, cancels: bool) -> None:
    """Step until all requests have ended; `cancels`: request 0 ends after its third token."""
    deadline = time.monotonic() + LIMIT_S
    while engine.has_unfinished:
        result = engine.step()
        for output in result.outputs:
            sequence = output.sequence
            if output.first and sequence.scores is not None:
                found.scores[f"{sequence.request_id} {sequence.choice}"] = _values(sequence.scores)
            if output.token_id != NO_TOKEN:
                found.tokens.setdefault(sequence.request_id, []).append(output.token_id)
        for sequence, error in result.failures:
            found.errors[sequence.request_id] = type(error).__name__
        if cancels and len(found.tokens.get("0", ())) >= 3:
            engine.abort("0")
        if not result.ran:
            time.sleep(IDLE_S)
        assert time.monotonic() < deadline, "the requests do not end"
