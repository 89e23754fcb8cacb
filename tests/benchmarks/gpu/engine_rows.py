"""An engine over a random model, stepped by hand: rows brought to their first token, steps timed, requests kept in flight."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from tests.benchmarks.gpu.model import RandomModel

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.lora import synchronize
from loraplex.platform.bench.report import BenchFailed

BLOCK = 16
NAMESPACE = bytes(32)
PREFILL_TOKENS = 2048
FIRST_TOKEN_S = 120.0
HOST_BYTES = 16 << 30
"""Pinned copies of adapters: pinning as many as are registered would take longer than all the rest."""
DISTINCT_BLOBS = 8
"""Adapters that differ in memory; more digests share them: thousands of different ones would only take long to draw."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`adapters` 0: the base model; otherwise row i uses adapter i % adapters."""

    count: int
    adapters: int
    prompt: int
    tokens: int

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


@contextmanager
def running_engine(
    model: RandomModel, source: AliasedSource, rows: Rows, adapter_bytes: int, page_dtype: str = "auto"
) -> Iterator[Engine]:
    """An engine with room for `rows` and for `adapter_bytes` of adapters (0: it serves none)."""
    config = EngineConfig(
        model=model.loaded.path,
        scheduler=SchedulerConfig(
            max_num_seqs=rows.count, max_num_batched_tokens=max(PREFILL_TOKENS, rows.count)
        ),
        cache=CacheConfig(block_size=BLOCK, num_blocks=rows.blocks, prefix_caching=False),
        lora=LoraConfig(max_bytes=adapter_bytes, host_max_bytes=HOST_BYTES, page_dtype=page_dtype),
    )
    engine = Engine(replace(model.loaded, num_blocks=rows.blocks), config, source)
    try:
        yield engine
    finally:
        engine.close()


def begin(engine: Engine, rows: Rows) -> None:
    """Make the adapters resident, then bring every row to its first token. Raises `BenchFailed`."""
    for index in range(rows.adapters):
        engine.add(_request(f"load {index}", [index], 1, index))
    await_first_tokens(engine, rows.adapters)
    generator = torch.Generator().manual_seed(rows.count)
    vocabulary = engine.model.config.vocab_size
    for row in range(rows.count):
        prompt = torch.randint(vocabulary, (rows.prompt,), generator=generator).tolist()
        engine.add(_request(str(row), prompt, rows.tokens, row % rows.adapters if rows.adapters else None))
    await_first_tokens(engine, rows.count)


def end(engine: Engine, rows: Rows) -> None:
    """Abort what `begin` added."""
    for row in range(rows.count):
        engine.abort(str(row))


def await_first_tokens(engine: Engine, count: int) -> None:
    """Step until `count` rows have one. Raises `BenchFailed`."""
    begun, deadline = 0, time.monotonic() + FIRST_TOKEN_S
    while begun < count:
        result = engine.step()
        if result.failures:
            raise BenchFailed(str(result.failures[0][1]))
        begun += sum(output.first for output in result.outputs)
        if not result.ran:
            time.sleep(0.001)
        if time.monotonic() > deadline:
            raise BenchFailed(f"{begun} of {count} rows began within {FIRST_TOKEN_S:g} s")


def token_seconds(engine: Engine, rows: Rows, steps: int) -> float:
    """Seconds per output token of a row over some steps. Raises `BenchFailed` when rows end."""
    began, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += len(engine.step().outputs)
    synchronize(engine.model.device)
    if not tokens:
        raise BenchFailed("no row gave a token")
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


def output_rate(engine: Engine, rows: Rows, picks: Sequence[int]) -> float:
    """Tokens per second of one request per pick, `rows.count` of them in flight."""
    waiting = list(enumerate(picks))[::-1]
    generator = torch.Generator().manual_seed(1)
    vocabulary = engine.model.config.vocab_size

    def add() -> None:
        index, pick = waiting.pop()
        prompt = torch.randint(vocabulary, (rows.prompt,), generator=generator).tolist()
        engine.add(_request(f"r{index}", prompt, rows.tokens, pick))

    for _ in range(min(rows.count, len(picks))):
        add()
    began, tokens, ended = time.perf_counter(), 0, 0
    while ended < len(picks):
        result = engine.step()
        if result.failures:
            raise BenchFailed(str(result.failures[0][1]))
        tokens += len(result.outputs)
        finished = sum(output.finish_reason is not None for output in result.outputs)
        ended += finished
        for _ in range(min(finished, len(waiting))):
            add()
        if not result.ran:
            time.sleep(0.0005)
    return tokens / (time.perf_counter() - began)


def _request(request_id: str, prompt: list[int], tokens: int, adapter: int | None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        namespace=NAMESPACE,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        adapter=None if adapter is None else adapter_ref(adapter),
    )
