"""`bench determinism`: how often a response changes with what its client cannot see, by default and with `deterministic`.

Invariant: every request runs alone on an empty cache first. Each axis repeats all of them, seeds included, in one other
circumstance, and compares token ids and the bits of their log-probabilities.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import torch

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.bench.lora import NAMESPACE, RandomAdapterSource, adapter_ref, report_job
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
class _Measurement:
    """One loaded model whose requests have `adapters` adapters in turn; 0: the base."""

    job: DeterminismJob
    model: LoadedModel
    config: EngineConfig
    adapters: int

    def engine(
        self, num_blocks: int | None = None, max_tokens: int | None = None, cached: bool = False
    ) -> "closing[Engine]":
        config = dataclasses.replace(
            self.config,
            scheduler=SchedulerConfig(max_num_seqs=min(self.job.rows, 32), max_num_batched_tokens=max_tokens),
            cache=CacheConfig(block_size=BLOCK_SIZE, prefix_caching=cached),
        )
        model = dataclasses.replace(self.model, num_blocks=num_blocks or self.model.num_blocks)
        return closing(Engine(model, config, RandomAdapterSource(self.model, self.job.rank)))

    def requests(self, prompts: Sequence[list[int]], max_tokens: int) -> list[EngineRequest]:
        return [
            EngineRequest(
                request_id=str(row),
                namespace=NAMESPACE,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, seed=row, logprobs=0, ignore_eos=True),
                adapter=adapter_ref(row % self.adapters) if self.adapters else None,
            )
            for row, prompt in enumerate(prompts)
        ]

    def run(self, axis: str, turns: list[EngineRequest], requests: list[EngineRequest]) -> Responses:
        """Run all requests in the circumstance of an axis. Raises `BenchFailed` if it did not occur."""
        blocks, half = (self.job.input_len - 1) // BLOCK_SIZE, self.job.rows // 2
        prompts = [request.prompt_token_ids for request in requests]
        # Of each row another number of blocks.
        begins = [prompt[: (row % blocks + 1) * BLOCK_SIZE] for row, prompt in enumerate(prompts)]
        cached = {"turns": turns, "hits": self.requests(begins, 1)}.get(axis, [])
        # As many blocks as hold the prompts of half the rows, but not their responses.
        few = half * (blocks + 1) + half - 1 if axis == "preemptions" else None
        with self.engine(few, CUT_TOKENS if axis == "cuts" else None, bool(cached)) as engine:
            run_each(engine, cached)
            run = run_at_once if axis in ("company", "preemptions") else run_each
            found, stats = run(engine, requests), engine.stats()
        if (cached and not stats.prefix_cache_hits) or (few and not stats.preemptions):
            raise BenchFailed(f"no row met {axis}; give more --rows, --input-len or --output-len")
        return found


def measure_determinism(job: DeterminismJob) -> Report:
    """Measure both modes, one loaded model after the other. Raises `ModelError` or `BenchFailed`."""
    report = Report("determinism", COLUMNS, notes=list(NOTES))
    num_blocks = 2 * job.rows * ((job.input_len + job.output_len) // BLOCK_SIZE + 1)
    for deterministic in (False, True):
        config = EngineConfig(
            model=job.model,
            dtype=job.dtype,
            device=job.device,
            deterministic=deterministic,
            cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
            lora=LoraConfig(max_bytes=8 << 30),
        )
        model = load_model(config)
        for adapters in sorted({0, job.adapters}):
            _measure_axes(report, _Measurement(job, model, config, adapters))
        del model  # before the other one is loaded
    return report


def _measure_axes(report: Report, of: _Measurement) -> None:
    job, mode = of.job, "deterministic" if of.config.deterministic else "default"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(of.model.config.vocab_size, (job.rows, job.input_len // 2), generator=generator)
    turns = of.requests(drawn.tolist(), -(-job.input_len // 2))
    with of.engine() as engine:
        said = run_each(engine, turns)
        prompts = [turn.prompt_token_ids + [token for token, _ in said[turn.request_id]] for turn in turns]
        requests = of.requests(prompts, job.output_len)
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
    figures = (tokens, 1000 * divergences / tokens, 1000 * changed / tokens, largest)
    return dict(zip(COLUMNS, figures, strict=True))


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    report_job(DeterminismJob, measure_determinism)


if __name__ == "__main__":
    main()
