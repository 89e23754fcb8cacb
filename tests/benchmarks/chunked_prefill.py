"""Inter-token latency of streaming rows while a long prompt arrives, with chunked prefill and without (Sarathi-Serve)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from loraplex.platform.bench.client import CompletionRequest, StreamRecord, decode, stream_completion
from loraplex.platform.bench.fixtures import open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts

CHUNKED, WHOLE = "chunked prefill", "whole prompts"
REQUIRED_RATIO = 0.25
COLUMNS = ("p99_itl_ms", "max_itl_ms", "median_itl_before_ms", "ttft_long_ms", "gaps")


@dataclass(frozen=True, slots=True)
class ChunkedPrefillShape:
    """`rows` stream; once each has `lead` pieces of text, a prompt of `long_len` arrives. `repeats` times over."""

    rows: int = 8
    input_len: int = 60
    output_len: int = 256
    lead: int = 20
    long_len: int = 2000
    repeats: int = 3
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class PrefillGaps:
    """Gaps between tokens of all rows in seconds: those that overlap the long prompt's prefill, and those before it."""

    during: tuple[float, ...]
    before: tuple[float, ...]
    long_ttft: float


async def measure_chunked_prefill(
    model: str, shape: ChunkedPrefillShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`."""
    report = Report("prefill", COLUMNS)
    p99: dict[str, float] = {}
    for name in (CHUNKED, WHOLE):
        progress(name)
        runs = await _runs(model, shape, {**settings, "chunked_prefill": str(name == CHUNKED).lower()})
        p99[name] = _add_case(report, shape, name, runs)
    ratio = Ratio(
        f"p99 inter-token latency: {CHUNKED} / {WHOLE}", p99[CHUNKED] / p99[WHOLE], REQUIRED_RATIO, "at most"
    )
    report.ratios.append(ratio)
    return report


def _add_case(report: Report, shape: ChunkedPrefillShape, name: str, runs: Sequence[PrefillGaps]) -> float:
    during = [gap for run in runs for gap in run.during]
    figure = {
        "p99_itl_ms": percentile(during, 99) * 1000,
        "max_itl_ms": max(during) * 1000,
        "median_itl_before_ms": median([gap for run in runs for gap in run.before]) * 1000,
        "ttft_long_ms": median([run.long_ttft for run in runs]) * 1000,
        "gaps": len(during),
    }
    report.cases.append(Case(name, asdict(shape), figure))
    return percentile(during, 99)


async def _runs(model: str, shape: ChunkedPrefillShape, settings: Mapping[str, str]) -> list[PrefillGaps]:
    """The rounds of one server without the first, which is the warm-up."""
    async with run_local_server(model, {"dtype": shape.dtype, **settings}) as server:
        async with open_fixtures(server) as fixtures:
            api_key = (await fixtures.tenant("bench")).api_key
        pool = await token_pool(server.base_url, api_key, BASE_MODEL)
        rounds = range(shape.repeats + 1)
        return [await _one_round(server.base_url, shape, pool, api_key, seed) for seed in rounds][1:]


async def _one_round(
    base_url: str, shape: ChunkedPrefillShape, pool: Sequence[int], api_key: str, seed: int
) -> PrefillGaps:
    requests = [
        CompletionRequest(BASE_MODEL, prompt, shape.output_len, api_key)
        for prompt in draw_prompts(pool, shape.rows, shape.input_len, seed * 2)
    ]
    prompt = draw_prompts(pool, 1, shape.long_len, seed * 2 + 1)[0]
    records = [StreamRecord(request) for request in requests]
    rows = [asyncio.create_task(stream_completion(base_url, record.request, record)) for record in records]
    while any(len(record.chunks) < shape.lead for record in records):
        if any(row.done() for row in rows):
            raise BenchFailed(f"a row ended before the long prompt came: {records[0].error or 'too short'}")
        await asyncio.sleep(0.002)
    long = await stream_completion(base_url, CompletionRequest(BASE_MODEL, prompt, 4, api_key))
    await asyncio.gather(*rows)
    return split_gaps(records, long)


def split_gaps(records: Sequence[StreamRecord], long: StreamRecord) -> PrefillGaps:
    """Split the gaps of the rows by whether they overlap the time from the long prompt's sending to its first token.

    Raises `BenchFailed` if a row ended before that token: the prefill could not delay it.
    """
    completion = decode(long)
    began, ended = long.sent_at, long.sent_at + completion.time_to_first_token
    during: list[float] = []
    before: list[float] = []
    for record in records:
        row = decode(record)
        if not row.complete or record.ended_at < ended:
            raise BenchFailed(
                f"a row ended during the long prompt's prefill: {row.error or 'raise --output-len'}"
            )
        times = [record.sent_at + at for at in row.token_times]
        for earlier, later in pairwise(times):
            if later <= began:
                before.append(later - earlier)
            elif earlier < ended:
                during.append(later - earlier)
    return PrefillGaps(tuple(during), tuple(before), completion.time_to_first_token)
