"""What thought costs: decode steps while half of the rows think against steps without, and CPU time of a row's mask per token.

Invariant: both sides take turns, step by step, so that drift affects them alike. Bounded thoughts never reach their bound here.
"""

import dataclasses
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import torch
from tests.benchmarks.checkout import CHECKOUT

from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.messages import EngineRequest
from loraplex.engine.model_loading import LoadedModel, load_model
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.token_mask import TokenMask
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.emit_llguidance import emit
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import ANY_TEXT, GrammarSpec, Thought, encode_spec
from loraplex.grammar.thought import THINK
from loraplex.grammar.tree import JsonValue
from loraplex.platform.bench.lora import BLOCK_SIZE, WARM_STEPS, RandomAdapterSource, run_in_subprocess
from loraplex.platform.bench.report import Case, Ratio, Report

MODULE = "tests.benchmarks.thought_step"
COLUMNS = ("step_ms", "thinking_step_ms", "fill_us", "accept_us")
PROMPT_TOKENS = 32
REQUIRED_STEP = 1.05
"""A step in which half of the rows think over one without."""
REQUIRED_ANSWER = 1.5
"""CPU time per token of an answer's mask behind a thought over the same mask alone."""
STRINGS = {"type": "array", "items": {"type": "string"}}


class ThoughtJob(msgspec.Struct, frozen=True):
    """The input of the measuring process. `tokens`: of one walk through a mask."""

    model: str
    dtype: str
    rows: int
    steps: int
    tokens: int


def measure_thought(job: ThoughtJob) -> Report:
    """Measure steps of one model with and without thought, then masks alone. Raises `ModelError`."""
    report = Report("thought-step", COLUMNS)
    config = EngineConfig(model=job.model, dtype=job.dtype, device="cpu")
    model = load_model(config)
    ends = frozenset(model.config.eos_token_ids)
    vocabulary = Vocabulary(model.tokenizer.to_str(), model.config.vocab_size, ends)
    compiler = MaskCompiler(vocabulary)
    compiler.warm_up()
    _measure_steps(report, config, model, compiler, job)
    _measure_masks(report, vocabulary, compiler, job.tokens)
    return report


def _measure_steps(
    report: Report, config: EngineConfig, model: LoadedModel, compiler: MaskCompiler, job: ThoughtJob
) -> None:
    thinking = encode_spec(_spec(ANY_TEXT, most=1 << 20))
    plain: list[float] = []
    half: list[float] = []
    with (
        _decoding(config, model, compiler, job, [None] * job.rows) as without,
        _decoding(
            config, model, compiler, job, [thinking if row % 2 else None for row in range(job.rows)]
        ) as beside,
    ):
        for _ in range(WARM_STEPS + job.steps):
            plain.append(_step_seconds(without, job.rows))
            half.append(_step_seconds(beside, job.rows))
    alone_s, beside_s = median(plain[WARM_STEPS:]), median(half[WARM_STEPS:])
    figure = {"step_ms": alone_s * 1000, "thinking_step_ms": beside_s * 1000}
    report.cases.append(Case(f"{job.rows} rows, half think", {"rows": job.rows, "steps": job.steps}, figure))
    report.ratios.append(
        Ratio("step while half of the rows think / without", beside_s / alone_s, REQUIRED_STEP, "at most")
    )


@contextmanager
def _decoding(
    config: EngineConfig,
    model: LoadedModel,
    compiler: MaskCompiler,
    job: ThoughtJob,
    grammars: list[bytes | None],
) -> Iterator[Engine]:
    """An engine whose rows decode, each with a grammar or none."""
    length = PROMPT_TOKENS + 4 * WARM_STEPS + job.steps + BLOCK_SIZE
    num_blocks = job.rows * (length // BLOCK_SIZE + 2)
    own = dataclasses.replace(
        config,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=job.rows),
        lora=LoraConfig(max_bytes=0),
    )
    engine = Engine(
        dataclasses.replace(model, num_blocks=num_blocks),
        own,
        RandomAdapterSource(model, 1),
        mask_factory=compiler.compile,
    )
    chance = random.Random(0)
    for row, grammar in enumerate(grammars):
        engine.add(
            EngineRequest(
                request_id=str(row),
                namespace=bytes(32),
                prompt_token_ids=[chance.randrange(model.config.vocab_size) for _ in range(PROMPT_TOKENS)],
                sampling=SamplingParams(max_tokens=length - PROMPT_TOKENS, seed=row, ignore_eos=True),
                grammar=grammar,
            )
        )
    started: set[str] = set()
    while len(started) < job.rows:
        started.update(output.sequence.request_id for output in engine.step().outputs)
    try:
        yield engine
    finally:
        for row in range(job.rows):
            engine.abort(str(row))
        engine.close()


def _step_seconds(engine: Engine, rows: int) -> float:
    """Seconds of the next step in which every row gets a token."""
    while True:
        began = time.perf_counter()
        result = engine.step()
        took = time.perf_counter() - began
        if len(result.outputs) == rows:
            return took


def _measure_masks(report: Report, vocabulary: Vocabulary, compiler: MaskCompiler, tokens: int) -> None:
    schema = GrammarSpec(backend="llguidance", source=emit(JsonValue(STRINGS)))
    word = vocabulary.spelled("a")[0]
    opening = vocabulary.spelled('["')
    ending = vocabulary.spelled(THINK.end)
    walks = {
        "in a thought": (_spec(ANY_TEXT, most=1 << 20), []),
        "in text behind a thought": (_spec(ANY_TEXT, most=1 << 20), ending),
        "in a string, no thought": (schema, opening),
        "in a string behind a thought": (_spec(schema, most=1 << 20), [*ending, *opening]),
    }
    per_token: dict[str, float] = {}
    for name, (spec, before) in walks.items():
        mask = compiler.compile(bytes(32), encode_spec(spec))
        for token in before:
            assert mask.accept(token), name
        fill_us, accept_us = _mask_seconds(mask, vocabulary, word, tokens)
        report.cases.append(Case(name, {"tokens": tokens}, {"fill_us": fill_us, "accept_us": accept_us}))
        per_token[name] = fill_us + accept_us
    alone = per_token["in a string, no thought"]
    behind = per_token["in a string behind a thought"]
    report.ratios += [
        Ratio(
            "CPU time per token in a string: behind a thought / alone",
            behind / alone,
            REQUIRED_ANSWER,
            "at most",
        ),
        Ratio("CPU time per token: in a thought / in a string", per_token["in a thought"] / alone),
    ]
    report.notes.append("A row without a mask fills and accepts nothing: 0 us.")


def _mask_seconds(mask: TokenMask, vocabulary: Vocabulary, token: int, tokens: int) -> tuple[float, float]:
    """Median CPU microseconds of (fill, accept)."""
    bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
    fills: list[float] = []
    accepts: list[float] = []
    for _ in range(tokens):
        began = time.thread_time()
        mask.fill(bitmask, 0)
        between = time.thread_time()
        assert mask.accept(token)
        accepts.append(time.thread_time() - between)
        fills.append(between - began)
    return median(fills) * 1e6, median(accepts) * 1e6


def _spec(answer: GrammarSpec, most: int) -> GrammarSpec:
    thought = Thought(start=THINK.start, end=THINK.end, most=most, begun=True)
    return msgspec.structs.replace(answer, thought=thought)


def measure_in_subprocess(job: ThoughtJob) -> Report:
    """Run the job in a child process. Raises `BenchFailed`."""
    return run_in_subprocess(MODULE, job, CHECKOUT)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ThoughtJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_thought(job)) + b"\n")


if __name__ == "__main__":
    main()
