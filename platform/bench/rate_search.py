"""`bench serve --find-rate`: the highest open-loop rate that holds objectives of latency, and the phase that breaks them.

Invariant: a rate breaks only if two probes of it break; each probe has new prompts, the same pattern of arrivals, and begins
after the last response of the one before.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Final

import httpx

from loraplex.platform.bench.client import Completion, CompletionRequest
from loraplex.platform.bench.latency_metrics import latencies, percentile
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.bench.report import BenchFailed, Case, Report
from loraplex.platform.bench.serve import ServerUnderLoad, ServeShape
from loraplex.platform.processes.progress import Progress
from loraplex.platform.startup_errors import SettingsError

METRICS: Final = ("ttft", "tpot", "itl", "e2el")
PRECISION = 1.06
"""The lowest rate that breaks is at most this many times the highest one that holds."""
MIN_RATE, MAX_RATE = 1 / 64, 4096.0
PROBE_S = 20.0
WARM_UP_REQUESTS = 8
SLOW_REQUESTS = 10
LEDGER_S = 15.0
AFTER_FIRST_TOKEN = ("decode", "finish")
_OBJECTIVE = re.compile(rf"({'|'.join(METRICS)})_p([5-9]\d)=(\d{{1,9}}(?:\.\d{{1,3}})?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Objective:
    """A percentile (50 to 99) of a metric is at most `limit_s` seconds."""

    metric: str
    share: int
    limit_s: float

    @property
    def name(self) -> str:
        return f"p{self.share}_{self.metric}_ms"

    def measured(self, result: LoadResult) -> float:
        """The percentile in seconds over all complete responses."""
        values = [value for each in result.completions if each.complete for value in self.values(each)]
        return percentile(values, self.share)

    def values(self, completion: Completion) -> list[float]:
        """The metric of one response, in seconds."""
        return latencies([completion])[self.metric]

    def counts(self, phase: str) -> bool:
        """Whether a phase of a request is part of the metric."""
        return self.metric == "e2el" or (phase in AFTER_FIRST_TOKEN) != (self.metric == "ttft")


@dataclass(frozen=True, slots=True)
class Probe:
    """The outcome of one rate, in requests per second. `broken`: objectives by how far they were missed, the farthest first."""

    rate: float
    figure: Mapping[str, float]
    failed: int
    broken: tuple[Objective, ...]
    result: LoadResult

    @property
    def holds(self) -> bool:
        return not self.failed and not self.broken


def parse_slo(text: str) -> tuple[Objective, ...]:
    """Parse `ttft_p95=500ms,itl_p95=80ms`. Raises `SettingsError`."""
    found = []
    for part in text.split(","):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None or not float(match[3]):
            raise SettingsError(
                f"--slo {part!r}: allowed is METRIC_PERCENTILE=TIME with {', '.join(METRICS)}, p50 to p99, and ms or s, "
                "such as ttft_p95=500ms"
            )
        found.append(Objective(match[1], int(match[2]), float(match[3]) * (0.001 if match[4] == "ms" else 1)))
    return tuple(found)


async def search_rate(
    probe: Callable[[float], Awaitable[Probe]], start: float
) -> tuple[Probe | None, Probe | None]:
    """The highest rate that holds and the lowest that breaks, by doubling or halving from `start`, then bisection.

    None: every rate down to `MIN_RATE` broke, or every one up to `MAX_RATE` held.
    """
    held = broken = None
    rate = start
    while (held is None or broken is None) and MIN_RATE <= rate <= MAX_RATE:
        found = await probe(rate)
        held, broken = (found, broken) if found.holds else (held, found)
        rate = rate * 2 if found.holds else rate / 2
    while held and broken and broken.rate / held.rate > PRECISION:
        found = await probe(math.sqrt(held.rate * broken.rate))
        held, broken = (found, broken) if found.holds else (held, found)
    return held, broken


async def find_rate(
    server: ServerUnderLoad,
    shape: ServeShape,
    objectives: Sequence[Objective],
    report: Report,
    progress: Progress,
) -> float:
    """Probe from the shape's rate on, by default 1 request per second. Return the highest that holds.

    Raises `BenchFailed` if none does.
    """
    report.columns += (*dict.fromkeys(each.name for each in objectives), "failed", "holds")
    seeds = iter(range(shape.traffic.seed + 1, shape.traffic.seed + 10_000))

    async def once(rate: float, requests: int) -> Probe:
        traffic = replace(shape.traffic, rate=rate)
        asked = replace(shape, num_requests=requests, traffic=traffic)
        found = _probe(rate, await server.run(asked, next(seeds)), objectives)
        report.cases.append(Case(f"{rate:.3g} per s", asdict(asked), {**found.figure, "holds": found.holds}))
        times = ", ".join(f"{name} {value:.0f}" for name, value in found.figure.items())
        progress(f"{rate:.3g} per s, {requests} requests: {times}: {'holds' if found.holds else 'breaks'}")
        return found

    async def twice(rate: float) -> Probe:
        requests = max(shape.num_requests, math.ceil(rate * PROBE_S))
        found = await once(rate, requests)
        return found if found.holds else await once(rate, requests)

    start = shape.traffic.rate or 1.0
    await server.run(replace(shape, num_requests=WARM_UP_REQUESTS), next(seeds))
    held, broken = await search_rate(twice, start)
    if held is None:
        raise BenchFailed(f"no rate holds: {_why(broken)} at {broken.rate if broken else start:.3g} per s")
    figure: dict[str, Any] = {
        "rate": held.rate,
        "broken_at": broken and broken.rate,
        "broken_by": _why(broken),
    }
    if broken is not None and broken.broken:
        figure |= await _phase(server.base_url, broken.broken[0], held, broken)
    report.cases.append(Case("highest rate that holds", asdict(shape), figure))
    report.notes.append(f"{held.rate:.3g} requests per second hold; {_verdict(figure)}")
    return held.rate


def _probe(rate: float, result: LoadResult, objectives: Sequence[Objective]) -> Probe:
    measured = {each: each.measured(result) for each in objectives}
    missed = [each for each in objectives if measured[each] > each.limit_s]
    failed = sum(completion.error is not None for completion in result.completions)
    return Probe(
        rate,
        {each.name: seconds * 1000 for each, seconds in measured.items()} | {"failed": failed},
        failed,
        tuple(sorted(missed, key=lambda each: each.limit_s / measured[each])),
        result,
    )


def _why(probe: Probe | None) -> str | None:
    """The objective that broke first, or the error of the requests that failed."""
    if probe is None:
        return None
    if probe.broken:
        return probe.broken[0].name
    return next((each.error for each in probe.result.completions if each.error is not None), None)


async def _phase(base_url: str, objective: Objective, held: Probe, broken: Probe) -> dict[str, Any]:
    """The phase whose mean duration over the slowest requests grew most from the rate that holds to the one that breaks.

    Empty if the key may not read timelines (scope `usage:read`).
    """
    async with httpx.AsyncClient(base_url=base_url, timeout=LEDGER_S) as client:
        before = await _durations(client, held.result, objective)
        after = await _durations(client, broken.result, objective)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    if not grown:
        return {}
    phase = max(grown, key=lambda name: grown[name])
    return {"phase": phase, "phase_ms_held": before.get(phase, 0.0), "phase_ms": after[phase]}


async def _durations(client: httpx.AsyncClient, result: LoadResult, objective: Objective) -> dict[str, float]:
    """Mean milliseconds of each phase that counts for the objective, over the slowest responses."""
    paired = zip(result.requests, result.completions, strict=True)
    slow = sorted(paired, key=lambda pair: -max(objective.values(pair[1]), default=0.0))[:SLOW_REQUESTS]
    timelines = [await _timeline(client, request) for request, _ in slow]
    phases = {name for timeline in timelines for name in timeline if objective.counts(name)}
    return {name: fmean(timeline.get(name, 0.0) for timeline in timelines) for name in phases}


async def _timeline(client: httpx.AsyncClient, request: CompletionRequest) -> dict[str, float]:
    """Milliseconds by phase, as soon as the ledger has the request; empty if the key may not read it."""
    path = f"/tenant/v1/requests/{request.request_id}/timeline"
    for _ in range(round(LEDGER_S)):
        response = await client.get(path, headers={"authorization": f"Bearer {request.api_key}"})
        if response.status_code == httpx.codes.FORBIDDEN:
            return {}
        if response.status_code == httpx.codes.OK:
            return {span["name"]: span["duration_ms"] for span in response.json()["spans"]}
        await asyncio.sleep(1)
    raise BenchFailed(f"GET {path}: HTTP {response.status_code} after {LEDGER_S:g} s: {response.text[:500]}")


def _verdict(figure: Mapping[str, Any]) -> str:
    if figure["broken_at"] is None:
        return f"none breaks up to {MAX_RATE:g}"
    broken = f"at {figure['broken_at']:.3g} {figure['broken_by']} breaks first"
    if "phase" not in figure:
        return f"{broken}; its phase is not known (the key needs the scope `usage:read`)"
    return f"{broken}, in {figure['phase']}: {figure['phase_ms_held']:.0f} -> {figure['phase_ms']:.0f} ms"
