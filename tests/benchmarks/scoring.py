"""Inter-token latency of streaming rows beside requests that score their prompts, and beside as many ordinary prompts.

A round has 50 to 70 steps, so its p99 is its slowest step or the one after. On a shared host the same work takes up to twice as
long for a second or two, in rounds of either load. So the quietest round of each load is compared, the one with the lowest p99,
and the median step of the median round; the table has the other p99.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from loraplex.platform.bench.client import CompletionRequest, StreamRecord, decode, stream_completion
from loraplex.platform.bench.fixtures import open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts

LOADS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ordinary prompts": {},
    "scored prompts": {"max_tokens": 0, "echo": True, "logprobs": 1},
}
"""What a prompt of each load asks for besides one token."""
REQUIRED_P99, REQUIRED_P50 = 1.25, 1.15
"""The most that a gap beside scored prompts may be, over one beside ordinary prompts."""
COLUMNS = ("quietest_p99_itl_ms", "median_p99_itl_ms", "worst_p99_itl_ms", "p50_itl_ms", "load_s", "gaps")


@dataclass(frozen=True, slots=True)
class ScoringShape:
    """`rows` stream; once each has `lead` pieces of text, `prompts` of `prompt_len` tokens arrive, `at_once` at a time.

    Each load has `repeats` rounds.
    """

    rows: int = 8
    input_len: int = 32
    output_len: int = 512
    lead: int = 10
    prompts: int = 200
    prompt_len: int = 60
    at_once: int = 16
    repeats: int = 5
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class BesideLoad:
    """Gaps between tokens of the rows while the load ran, and how long it took; in seconds."""

    gaps: tuple[float, ...]
    seconds: float


async def measure_scoring(
    model: str, shape: ScoringShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Alternate the two loads on one server. Raises `BenchFailed`."""
    report = Report("scoring", COLUMNS)
    found: dict[str, list[BesideLoad]] = {name: [] for name in LOADS}
    async with run_local_server(model, {"dtype": shape.dtype, **settings}) as server:
        async with open_fixtures(server) as fixtures:
            api_key = (await fixtures.tenant("bench")).api_key
        pool = await token_pool(server.base_url, api_key, BASE_MODEL)
        for seed in range(shape.repeats + 1):
            for index, (name, options) in enumerate(LOADS.items()):
                progress(f"{name}, round {seed}" if seed else f"{name}, warm-up")
                run = await _round(server.base_url, shape, pool, api_key, options, 10 * seed + index)
                found[name] += [run] if seed else []
    for name, runs in found.items():
        report.cases.append(Case(name, asdict(shape), figures_of(runs)))
    report.ratios += compare(*(case.figure for case in report.cases))
    return report


def figures_of(rounds: Sequence[BesideLoad]) -> dict[str, float]:
    """Return `COLUMNS` of the rounds of one load."""
    p99 = [percentile(each.gaps, 99) * 1000 for each in rounds]
    return {
        "quietest_p99_itl_ms": min(p99),
        "median_p99_itl_ms": median(p99),
        "worst_p99_itl_ms": max(p99),
        "p50_itl_ms": median(percentile(each.gaps, 50) for each in rounds) * 1000,
        "load_s": median(each.seconds for each in rounds),
        "gaps": sum(len(each.gaps) for each in rounds),
    }


def compare(ordinary: Mapping[str, float], scored: Mapping[str, float]) -> Iterator[Ratio]:
    """Yield the ratios of the figures beside scored prompts to those beside ordinary prompts."""
    required = {"quietest_p99_itl_ms": REQUIRED_P99, "p50_itl_ms": REQUIRED_P50}
    for name, most in required.items():
        yield Ratio(f"{name}: scored / ordinary prompts", scored[name] / ordinary[name], most, "at most")


async def _round(
    base_url: str,
    shape: ScoringShape,
    pool: Sequence[int],
    api_key: str,
    options: Mapping[str, Any],
    seed: int,
) -> BesideLoad:
    rows = [
        StreamRecord(CompletionRequest(BASE_MODEL, prompt, shape.output_len, api_key))
        for prompt in draw_prompts(pool, shape.rows, shape.input_len, 2 * seed)
    ]
    running = await start_rows(base_url, rows, shape.lead)
    prompts = iter(draw_prompts(pool, shape.prompts, shape.prompt_len, 2 * seed + 1))
    answers: list[StreamRecord] = []

    async def send() -> None:
        for prompt in prompts:
            request = CompletionRequest(BASE_MODEL, prompt, 1, api_key, options=options, stream=False)
            answers.append(await stream_completion(base_url, request))

    await asyncio.gather(*(send() for _ in range(shape.at_once)))
    await asyncio.gather(*running)
    if any(answer.status != 200 for answer in answers):
        raise BenchFailed(f"a prompt failed: {next(a.status for a in answers if a.status != 200)}")
    return gaps_beside(rows, min(each.sent_at for each in answers), max(each.ended_at for each in answers))


async def start_rows(
    base_url: str, rows: Sequence[StreamRecord], lead: int
) -> list["asyncio.Task[StreamRecord]"]:
    """Start rows, and wait until each has `lead` pieces of text. Raises `BenchFailed` if one ends before."""
    running = [asyncio.create_task(stream_completion(base_url, row.request, row)) for row in rows]
    while any(len(row.chunks) < lead for row in rows):
        if any(task.done() for task in running):
            raise BenchFailed(f"a row ended before the load came: {rows[0].error or 'too short'}")
        await asyncio.sleep(0.002)
    return running


def gaps_beside(rows: Sequence[StreamRecord], began: float, ended: float) -> BesideLoad:
    """Return the gaps of the rows while a load ran. Raises `BenchFailed` if a row ended before it."""
    gaps: list[float] = []
    for row in rows:
        found = decode(row)
        if not found.complete or row.ended_at < ended:
            raise BenchFailed(f"a row ended before the load: {found.error or 'raise --output-len'}")
        times = [row.sent_at + at for at in found.token_times]
        gaps += [later - earlier for earlier, later in pairwise(times) if later > began and earlier < ended]
    return BesideLoad(tuple(gaps), ended - began)
