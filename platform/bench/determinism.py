"""`bench determinism`: how often a response changes with what its client cannot see, by default and with `deterministic`.

Invariant: every request runs alone on an empty cache first. Each axis repeats all of them, seeds included, in one other
circumstance, and compares token ids and the bits of their log-probabilities.
"""

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import torch

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import AdapterRef, EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.lora import NAMESPACE, RandomAdapterSource
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report

MODULE = "loraplex.platform.bench.determinism"
AXES = ("company", "cuts", "hits", "turns", "preemptions")
BLOCK_SIZE = 16
CUT_TOKENS = 37
"""Step budget of the axis `cuts`: no multiple of a block or of a tile."""
COLUMNS = ("tokens", "divergences_per_1000", "changed_logprobs_per_1000", "max_logprob_difference")
NOTES = (
    "divergences: responses whose text leaves that of the same request alone on an empty cache.",
    "changed_logprobs: tokens before that whose log-probability has other bits.",
    f"company: all requests at once. cuts: steps of {CUT_TOKENS} tokens. hits: a part of the prompt is cached.",
    "turns: the prompt holds a response whose blocks decoding wrote. preemptions: too few blocks for all at once.",
)
Responses = dict[str, list[tuple[int, float]]]
"""Token ids and log-probabilities by request id."""


class DeterminismJob(msgspec.Struct, frozen=True):
    """The input of the measuring process: `rows` requests of the base, and as many over `adapters` of `rank`.

    A prompt has `input_len` tokens, of which the second half is the model's own response to the first.
    """

    model: str
    dtype: str
    device: str
    rows: int
    input_len: int
    output_len: int
    adapters: int
    rank: int


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests of one loaded model that have `adapters` adapters in turn; 0: the base."""

    job: DeterminismJob
    model: LoadedModel
    config: EngineConfig
    adapters: int

    def engine(
        self, num_blocks: int = 0, max_tokens: int | None = None, cached: bool = False
    ) -> "closing[Engine]":
        job = self.job
        config = dataclasses.replace(
            self.config,
            scheduler=SchedulerConfig(max_num_seqs=min(job.rows, 32), max_num_batched_tokens=max_tokens),
            cache=CacheConfig(block_size=BLOCK_SIZE, prefix_caching=cached),
        )
        ample = 2 * job.rows * ((job.input_len + job.output_len) // BLOCK_SIZE + 1)
        model = dataclasses.replace(self.model, num_blocks=num_blocks or ample)
        return closing(Engine(model, config, RandomAdapterSource(self.model, job.rank)))

    def request(self, row: int, prompt: list[int], max_tokens: int, name: str = "") -> EngineRequest:
        digest = f"{row % max(1, self.adapters) + 1:08x}" * 8
        return EngineRequest(
            request_id=f"{name}{row}",
            namespace=NAMESPACE,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=row, logprobs=0, ignore_eos=True),
            adapter=AdapterRef(namespace=NAMESPACE, digest=digest, blob_path="") if self.adapters else None,
        )

    def run(self, axis: str, turns: list[EngineRequest], requests: list[EngineRequest]) -> Responses:
        """Run all requests in the circumstance of an axis. Raises `BenchFailed` if it did not occur."""
        # As many blocks as hold the prompts of half the rows, but not their responses.
        half = self.job.rows // 2
        few = half * -(-self.job.input_len // BLOCK_SIZE) + half - 1 if axis == "preemptions" else 0
        cached, cut = axis in ("hits", "turns"), CUT_TOKENS if axis == "cuts" else None
        with self.engine(few, cut, cached) as engine:
            if cached:
                run_each(engine, turns if axis == "turns" else self._beginnings(requests))
            run = run_at_once if axis in ("company", "preemptions") else run_each
            found, stats = run(engine, requests), engine.stats()
        if (cached and not stats.prefix_cache_hits) or (few and not stats.preemptions):
            raise BenchFailed(f"no row met {axis}; give more --rows, --input-len or --output-len")
        return found

    def _beginnings(self, requests: list[EngineRequest]) -> list[EngineRequest]:
        """Return requests that leave beginnings of the prompts in the cache, of another number of blocks for each row."""
        blocks = (self.job.input_len - 1) // BLOCK_SIZE
        return [
            self.request(row, request.prompt_token_ids[: (row % blocks + 1) * BLOCK_SIZE], 1, "begin ")
            for row, request in enumerate(requests)
        ]


def measure_determinism(job: DeterminismJob) -> Report:
    """Measure both modes, one loaded model after the other. Raises `ModelError` or `BenchFailed`."""
    report = Report("determinism", COLUMNS, notes=list(NOTES))
    for deterministic in (False, True):
        config = EngineConfig(
            model=job.model,
            dtype=job.dtype,
            device=job.device,
            deterministic=deterministic,
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=1024),
            lora=LoraConfig(max_bytes=8 << 30),
        )
        model = load_model(config)
        for adapters in sorted({0, job.adapters}):
            _measure_axes(report, _Requests(job, model, config, adapters))
        del model  # before the other one is loaded
    return report


def _measure_axes(report: Report, of: _Requests) -> None:
    job, mode = of.job, "deterministic" if of.config.deterministic else "default"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(of.model.config.vocab_size, (job.rows, job.input_len // 2), generator=generator)
    turns = [
        of.request(row, prompt, -(-job.input_len // 2), "turn ") for row, prompt in enumerate(drawn.tolist())
    ]
    with of.engine() as engine:
        said = run_each(engine, turns)
        prompts = [turn.prompt_token_ids + [token for token, _ in said[turn.request_id]] for turn in turns]
        requests = [of.request(row, prompt, job.output_len) for row, prompt in enumerate(prompts)]
        alone = run_each(engine, requests)
    shape = msgspec.structs.asdict(job)
    del shape["model"]
    for axis in AXES:
        figure = compare(alone, of.run(axis, turns, requests))
        name = f"{mode}, {f'{of.adapters} adapters' if of.adapters else 'base'}: {axis}"
        report.cases.append(Case(name, shape, figure))
        if of.config.deterministic:
            changes = figure["divergences_per_1000"] + figure["changed_logprobs_per_1000"]
            report.ratios.append(Ratio(f"{name}: changes per 1,000 tokens", changes, 0.0, "at most"))


def run_each(engine: Engine, requests: Sequence[EngineRequest]) -> Responses:
    """Run one request after the other."""
    return {name: found for request in requests for name, found in run_at_once(engine, [request]).items()}


def run_at_once(engine: Engine, requests: Sequence[EngineRequest]) -> Responses:
    """Run requests that arrive at once. Raises `BenchFailed` when one fails."""
    responses: Responses = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        result = engine.step()
        if result.failures:
            raise BenchFailed(str(result.failures[0][1]))
        for output in result.outputs:
            if output.logprob is not None:
                responses[output.sequence.request_id].append((output.token_id, output.logprob.logprob))
        if not result.ran:
            engine.adapters.on_loaded.wait(0.05)
    return responses


def compare(expected: Responses, found: Responses) -> dict[str, float]:
    """Count the texts that leave the expected ones, and changed log-probabilities before that, per 1,000 tokens."""
    tokens = divergences = changed = 0
    largest = 0.0
    for name, response in expected.items():
        for (token, logprob), (other, value) in zip(response, found[name], strict=True):
            tokens += 1
            if token != other:
                divergences += 1
                break
            changed += logprob != value
            largest = max(largest, abs(logprob - value))
    return {
        "tokens": tokens,
        "divergences_per_1000": 1000 * divergences / tokens,
        "changed_logprobs_per_1000": 1000 * changed / tokens,
        "max_logprob_difference": largest,
    }


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=DeterminismJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_determinism(job)) + b"\n")


if __name__ == "__main__":
    main()
