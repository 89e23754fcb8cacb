"""`bench adapters`: traffic on more adapters than the residency budget holds, against traffic on resident ones.

Invariant: both kinds of traffic run on one server alternately (ABAB) with the same budget and the same request shape.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median

import httpx

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.models.config import ModelConfig
from loraplex.platform.bench.client import Completion, CompletionRequest
from loraplex.platform.bench.fixtures import (
    BenchTenant,
    adapter_name,
    adapter_parameters,
    open_fixtures,
    token_pool,
)
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer, run_local_server
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts, pick_adapters
from loraplex.platform.processes.progress import Progress

REQUIRED_RATE = 0.8
MARGIN = 1e-3
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The gateway reads the engine's counters about once a second.
COUNTERS_SETTLE_S = 2.5
MANY, RESIDENT = "all registered", "resident only"


@dataclass(frozen=True, slots=True)
class ManyAdaptersShape:
    """`resident` is the number of adapters of mean size that the budget of bytes holds."""

    registered: int = 300
    resident: int = 16
    ranks: tuple[int, ...] = (4, 8, 16)
    zipf: float = 1.1
    requests: int = 200
    concurrency: int = 16
    input_len: int = 60
    output_len: int = 64
    repeats: int = 2
    samples: int = 20
    dtype: str = "bfloat16"

    def budget_bytes(self, model: ModelConfig) -> int:
        """Room for `resident` adapters of mean size, and for all adapters of the resident tenant at once."""
        sizes = [adapter_parameters(model, rank) * DTYPE_BYTES[self.dtype] for rank in self.ranks]
        together = sum(sizes[index % len(sizes)] for index in range(self.resident))
        return max(self.resident * sum(sizes) // len(sizes), together)


async def measure_many_adapters(
    model: str, shape: ManyAdaptersShape, settings: Mapping[str, str], progress: Progress
) -> Report:
    """Raises `BenchFailed`."""
    budget = shape.budget_bytes(load_model_config(model))
    own = {"dtype": shape.dtype, "adapter_bytes": str(budget), **settings}
    report = Report("adapters", ("output_throughput", "runs", "distinct_adapters", "adapter_loads"))
    progress("starting the server")
    async with run_local_server(model, own) as server:
        tenants, pool = await _register(server, shape, report, progress)
        await _warm(server, tenants[RESIDENT], pool, shape)
        results: dict[str, list[LoadResult]] = {RESIDENT: [], MANY: []}
        loads = {RESIDENT: 0, MANY: 0}
        counted = await _adapter_loads(server.base_url)
        for repeat in range(shape.repeats):
            for kind, runs in results.items():
                stage = f"round {repeat + 1} of {shape.repeats}: {kind}"
                progress(stage)
                requests = _requests(shape, kind, tenants[kind], pool, repeat)
                on_share = partial(progress, stage)
                result = await run_load(server.base_url, requests, shape.concurrency, on_share=on_share)
                runs.append(result.require_complete())
                before, counted = counted, await _adapter_loads(server.base_url)
                loads[kind] += counted - before
        progress(f"repeating {shape.samples} answers alone")
        parity = await compare_with_lone_runs(server.base_url, results[MANY][-1], shape.samples)
    _summarize(report, shape, budget, results, loads)
    parity.add_to(report)
    return report


async def _register(
    server: LocalServer, shape: ManyAdaptersShape, report: Report, progress: Progress
) -> tuple[dict[str, BenchTenant], list[int]]:
    async with open_fixtures(server) as fixtures:
        tenants = {MANY: await fixtures.tenant("many"), RESIDENT: await fixtures.tenant("resident")}
        for kind, count in ((MANY, shape.registered), (RESIDENT, shape.resident)):
            progress(f"registering {count} adapters ({kind})")
            ranks = [shape.ranks[index % len(shape.ranks)] for index in range(count)]
            pushes = await fixtures.push_random(tenants[kind], ranks)
            report.notes.append(f"{kind}: {pushes.note()}")
        return tenants, await token_pool(server.base_url, tenants[MANY].api_key, BASE_MODEL)


async def _warm(
    server: LocalServer, tenant: BenchTenant, pool: Sequence[int], shape: ManyAdaptersShape
) -> None:
    """Request each adapter of the resident tenant once, so that its first round finds them on the device."""
    prompts = draw_prompts(pool, shape.resident, shape.input_len, seed=-1)
    requests = [
        CompletionRequest(adapter_name(index), prompt, 8, tenant.api_key)
        for index, prompt in enumerate(prompts)
    ]
    (await run_load(server.base_url, requests, shape.concurrency)).require_complete()


async def _adapter_loads(base_url: str) -> int:
    """Adapters that the server has loaded to the device since it started, from its metrics."""
    await asyncio.sleep(COUNTERS_SETTLE_S)
    async with httpx.AsyncClient(base_url=base_url) as client:
        text = (await client.get("/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("loraplex_adapter_loads_total")]
    return round(sum(float(line.rpartition(" ")[2]) for line in counts))


def _requests(
    shape: ManyAdaptersShape, kind: str, tenant: BenchTenant, pool: Sequence[int], repeat: int
) -> list[CompletionRequest]:
    adapters = shape.registered if kind == MANY else shape.resident
    picks = pick_adapters(adapters, shape.requests, "zipf", shape.zipf, seed=repeat)
    seed = repeat * 2 + (kind == MANY)
    prompts = draw_prompts(pool, shape.requests, shape.input_len, seed)
    return [
        CompletionRequest(adapter_name(pick), prompt, shape.output_len, tenant.api_key)
        for pick, prompt in zip(picks, prompts, strict=True)
    ]


def _summarize(
    report: Report,
    shape: ManyAdaptersShape,
    budget: int,
    results: Mapping[str, Sequence[LoadResult]],
    loads: Mapping[str, int],
) -> None:
    for kind, runs in results.items():
        rates = [run.output_rate for run in runs]
        figure = {
            "output_throughput": median(rates),
            "runs": [round(rate, 2) for rate in rates],
            "distinct_adapters": len({request.model for run in runs for request in run.requests}),
            "adapter_loads": loads[kind],
        }
        report.cases.append(Case(kind, asdict(shape) | {"adapter_bytes": budget}, figure))
    many, resident = (median([run.output_rate for run in results[kind]]) for kind in (MANY, RESIDENT))
    report.ratios.append(Ratio(f"output rate: {MANY} / {RESIDENT}", many / resident, REQUIRED_RATE))


@dataclass(slots=True)
class OutputParity:
    """Outputs of a concurrent run compared with the same requests run alone.

    `margins` has one log-probability margin for each output that differs, at the first differing token.
    """

    compared: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def explained(self) -> int:
        """Outputs that are equal, or differ first at a token whose margin is at most `MARGIN`."""
        return self.compared - sum(margin > MARGIN for margin in self.margins)

    def add_to(self, report: Report) -> None:
        """Add a case, a note and a ratio."""
        figure = {
            "compared": self.compared,
            "equal": self.compared - len(self.margins),
            "margins": [round(margin, 5) for margin in self.margins],
        }
        report.cases.append(Case("parity with lone runs", {"margin": MARGIN}, figure))
        report.notes.append(
            f"parity: {figure['equal']} of {self.compared} equal; margins {figure['margins']}"
        )
        if self.compared:
            share = self.explained / self.compared
            report.ratios.append(Ratio("answers equal to lone runs, or within the margin", share, 1.0))


async def compare_with_lone_runs(base_url: str, concurrent: LoadResult, samples: int) -> OutputParity:
    """Repeat every n-th request of `concurrent` alone, with log-probabilities. Raises `BenchFailed`."""
    parity = OutputParity()
    step = max(len(concurrent.requests) // max(samples, 1), 1)
    for index in range(0, len(concurrent.requests), step)[:samples]:
        request = replace(concurrent.requests[index], options={"logprobs": 2})
        alone = (await run_load(base_url, [request])).require_complete().completions[0]
        parity.compared += 1
        if (margin := margin_at_difference(concurrent.completions[index].text, alone)) is not None:
            parity.margins.append(margin)
    return parity


def margin_at_difference(text: str, alone: Completion) -> float | None:
    """Margin of the two best tokens of the run alone where `text` departs from it; None if the texts are equal."""
    if text == alone.text:
        return None
    common = next(
        (at for at, (one, other) in enumerate(zip(text, alone.text)) if one != other),
        min(len(text), len(alone.text)),
    )
    end = 0
    for token, top in zip(alone.tokens, alone.tops):
        end += len(token)
        if end > common:
            return _margin(top)
    return float("inf")


def _margin(top: Mapping[str, float]) -> float:
    best = sorted(top.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")
