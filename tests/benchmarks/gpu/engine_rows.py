"""An engine over a random model, stepped by hand: rows brought to their first token, steps timed, requests kept in flight."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from tests.benchmarks.gpu.model import RandomModel
from tests.benchmarks.kernels.clock import synchronize
from tests.benchmarks.kernels.lora import row_slots

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine, StepResult
from loraplex.engine.lora.memory import page_format
from loraplex.engine.lora.memory.rank_quantization import QuantizedModule, quantize_module
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_mask import TokenMaskFactory
from loraplex.platform.bench.report import BenchFailed

BLOCK = 16
NAMESPACE = bytes(32)
STEP_TOKENS = 1024
"""The default of a step on CUDA."""
FIRST_TOKEN_S = 120.0
IDLE_S = 0.0002
"""Between two looks at what another thread does: a loop without a pause would take the interpreter from that thread."""
HOST_ADAPTERS = 8
"""Pinned copies, where not many are needed: pinning takes about a second for four gigabytes."""
DISTINCT_BLOBS = 4
"""Adapters that differ in memory; more digests share them. Drawing one takes a third of a second of a core."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`adapters` 0: the base model; otherwise rows use them in turn, or drawn with a `zipf` exponent."""

    count: int
    adapters: int
    prompt: int
    tokens: int
    zipf: float = 0.0

    def picks(self) -> list[int | None]:
        """The adapter of each row."""
        return [*row_slots(self.count, self.adapters, self.zipf)] if self.adapters else [None] * self.count

    @property
    def blocks(self) -> int:
        return self.count * ((self.prompt + self.tokens) // BLOCK + 2) + 1


class AliasedSource:
    """An `AdapterSource` of many digests over few random adapters, which are drawn once and stay on the host."""

    def __init__(self, config: ModelConfig, rank: int, dtype: torch.dtype) -> None:
        self._config, self._rank, self._dtype = config, rank, dtype
        self._blobs: dict[int, dict[str, LoraModule]] = {}

    def load(self, adapter: AdapterRef) -> LoraWeights:
        index = int(adapter.digest[:8], 16) % DISTINCT_BLOBS
        if index not in self._blobs:
            self._blobs[index] = self._drawn(index)
        return LoraWeights(digest=adapter.digest, modules=self._blobs[index])

    @property
    def nbytes(self) -> int:
        """Of one adapter."""
        shapes = self._config.projection_shapes().values()
        elements = self._config.num_layers * self._rank * sum(sum(shape) for shape in shapes)
        return elements * self._dtype.itemsize

    def _drawn(self, seed: int) -> dict[str, LoraModule]:
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=self._dtype)
            return drawn.mul_(deviation)

        return {
            f"layers.{layer}.{name}": LoraModule(
                normal(self._rank, inputs, inputs**-0.5), normal(outputs, self._rank, 0.02)
            )
            for layer in range(self._config.num_layers)
            for name, (outputs, inputs) in self._config.projection_shapes().items()
        }


def adapter_ref(index: int) -> AdapterRef:
    """The adapter of this number."""
    return AdapterRef(namespace=NAMESPACE, digest=f"{index + 1:08x}" * 8, blob_path="")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`adapter_bytes` 0: it serves none. `host_bytes`: pinned for adapters that leave the device; None: for a few."""

    adapter_bytes: int = 0
    host_bytes: int | None = None
    page_dtype: str = "auto"
    cuda_graphs: str = "auto"
    mask_factory: TokenMaskFactory | None = None
    prefix_caching: bool = False


@contextmanager
def running_engine(
    model: RandomModel, source: AliasedSource, rows: Rows, options: EngineOptions
) -> Iterator[Engine]:
    """An engine with room for `rows`, with the step size of a GPU."""
    few = HOST_ADAPTERS * source.nbytes if options.adapter_bytes else 0
    config = EngineConfig(
        model=model.loaded.path,
        cuda_graphs=options.cuda_graphs,
        quantization=model.scheme,
        max_model_len=model.loaded.max_model_len,
        scheduler=SchedulerConfig(
            max_num_seqs=rows.count, max_num_batched_tokens=max(STEP_TOKENS, rows.count)
        ),
        cache=CacheConfig(block_size=BLOCK, num_blocks=rows.blocks, prefix_caching=options.prefix_caching),
        lora=LoraConfig(
            max_bytes=options.adapter_bytes,
            host_max_bytes=few if options.host_bytes is None else options.host_bytes,
            page_dtype=options.page_dtype,
        ),
    )
    loaded = replace(model.loaded, num_blocks=rows.blocks)
    engine = Engine(loaded, config, source, mask_factory=options.mask_factory)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def quantized_once() -> Iterator[None]:
    """Within, a module in 8-bit pages is computed once for all digests that share it.

    A loader takes half a second for each adapter of an 8B model, of which jobs load 64.
    """
    pages: dict[int, QuantizedModule] = {}

    def quantize(module: LoraModule, dtype: torch.dtype) -> QuantizedModule:
        # By identity: the source keeps its modules, so no other one takes their place in memory.
        if id(module) not in pages:
            pages[id(module)] = quantize_module(module, dtype)
        return pages[id(module)]

    with patch.object(page_format, "quantize_module", quantize):
        yield


def begin(
    engine: Engine, rows: Rows, sampling: Sequence[dict[str, Any]] = ({},), grammar: bytes | None = None
) -> None:
    """Make the adapters resident, then bring every row to its first token; rows take turns of `sampling`.

    Raises `BenchFailed`.
    """
    for index in range(rows.adapters):
        engine.add(request(f"load {index}", [index], 1, index))
    await_first_tokens(engine, rows.adapters)
    picks, prompts = rows.picks(), random_prompts(engine, rows.count, rows.prompt)
    for row, (pick, prompt) in enumerate(zip(picks, prompts, strict=True)):
        options = sampling[row % len(sampling)]
        engine.add(request(str(row), prompt, rows.tokens, pick, grammar=grammar, **options))
    await_first_tokens(engine, rows.count)


def random_prompts(engine: Engine, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """The same ones for the same numbers."""
    generator = torch.Generator().manual_seed(seed + count)
    vocabulary = engine.model.config.vocab_size
    return torch.randint(2, vocabulary, (count, tokens), generator=generator).tolist()


def end(engine: Engine, rows: Rows) -> None:
    """Abort what `begin` added."""
    for row in range(rows.count):
        engine.abort(str(row))


def await_first_tokens(engine: Engine, count: int) -> None:
    """Step until `count` rows have one. Raises `BenchFailed`."""
    begun, deadline = 0, time.monotonic() + FIRST_TOKEN_S
    while begun < count:
        begun += sum(output.first for output in stepped(engine).outputs)
        if time.monotonic() > deadline:
            raise BenchFailed(f"{begun} of {count} rows began within {FIRST_TOKEN_S:g} s")


def stepped(engine: Engine) -> StepResult:
    """One step; a short pause if nothing could run. Raises `BenchFailed` for a row that failed."""
    result = engine.step()
    if result.failures:
        raise BenchFailed(str(result.failures[0][1]))
    if not result.ran:
        time.sleep(IDLE_S)
    return result


def release(device: torch.device) -> None:
    """Give the memory of closed engines back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def token_seconds(engine: Engine, rows: Rows, steps: int) -> float:
    """Seconds per output token of a row over so many steps that gave tokens. Raises `BenchFailed`."""
    began, tokens, given = time.perf_counter(), 0, 0
    while given < steps:
        outputs = stepped(engine).outputs
        tokens, given = tokens + len(outputs), given + bool(outputs)
        if time.perf_counter() - began > FIRST_TOKEN_S:
            raise BenchFailed(f"{given} of {steps} steps gave tokens within {FIRST_TOKEN_S:g} s")
    synchronize(engine.model.device)
    return (time.perf_counter() - began) * rows.count / tokens


def step_gaps(engine: Engine, steps: int, before_step: Sequence[AdapterRef] = ()) -> list[float]:
    """Seconds of each step; before every fourth one an adapter of `before_step` is asked for, in turn."""
    gaps = []
    for step in range(steps):
        if before_step and step % 4 == 0:
            engine.adapters.prefetch(before_step[step // 4 % len(before_step)])
        began = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - began)
    return gaps


@dataclass(slots=True)
class Served:
    """What a stretch of traffic gave: tokens of each request that ended, and how long it all took."""

    seconds: float = 0.0
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return sum(self.tokens.values()) / self.seconds


def serve(engine: Engine, requests: Sequence[EngineRequest], in_flight: int) -> Served:
    """All requests to their ends, `in_flight` of them at a time."""
    waiting, served, ended = list(requests)[::-1], Served(), 0
    for _ in range(min(in_flight, len(requests))):
        engine.add(waiting.pop())
    began = time.perf_counter()
    while ended < len(requests):
        finished = 0
        for output in stepped(engine).outputs:
            name = output.sequence.request_id
            served.tokens[name] = served.tokens.get(name, 0) + 1
            finished += output.finish_reason is not None
        ended += finished
        for _ in range(min(finished, len(waiting))):
            engine.add(waiting.pop())
    served.seconds = time.perf_counter() - began
    return served


def prefill_rate(engine: Engine, rows: Rows, seed: int) -> float:
    """Prompt tokens per second of all rows at once, each ending with its first token. `seed`: prompts of their own."""
    prompts = random_prompts(engine, rows.count, rows.prompt, seed)
    requests = [
        request(f"prefill {index}", prompt, 1, pick)
        for index, (pick, prompt) in enumerate(zip(rows.picks(), prompts, strict=True))
    ]
    return rows.count * rows.prompt / serve(engine, requests, rows.count).seconds


def output_rate(engine: Engine, rows: Rows, picks: Sequence[int]) -> float:
    """Tokens per second of one request per pick, `rows.count` of them in flight."""
    prompts = random_prompts(engine, len(picks), rows.prompt, seed=1)
    requests = [
        request(f"r{index}", prompt, rows.tokens, pick)
        for index, (pick, prompt) in enumerate(zip(picks, prompts, strict=True))
    ]
    return serve(engine, requests, rows.count).rate


def request(
    request_id: str,
    prompt: list[int],
    tokens: int,
    adapter: int | None = None,
    *,
    grammar: bytes | None = None,
    **sampling: Any,
) -> EngineRequest:
    """A greedy request that ends after `tokens`, unless `sampling` says otherwise."""
    chosen = {"temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=request_id,
        namespace=NAMESPACE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, **chosen),
        adapter=None if adapter is None else adapter_ref(adapter),
        grammar=grammar,
    )
