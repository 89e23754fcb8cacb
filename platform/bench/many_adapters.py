"""`bench adapters`: hundreds of registered adapters over a residency budget of few, against traffic on resident ones.

Invariant: both kinds of traffic run on one server in turn (ABAB) with the same budget and the same request shape.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import httpx

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.models.config import ModelConfig
from loraplex.platform.bench.client import Answer, CompletionRequest
from loraplex.platform.bench.fixtures import (
    BenchTenant,
    adapter_name,
    adapter_parameters,
    registration,
    token_pool,
)
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, OwnServer, own_server
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts, pick_adapters

REQUIRED_RATE = 0.8
MARGIN = 1e-3
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The gateway reads the engine's counters about once a second.
COUNTERS_SETTLE_S = 2.5
MANY, RESIDENT = "all registered", "resident only"


@dataclass(frozen=True, slots=True)
class ManyShape:
    """`resident` is how many adapters of mean size the budget of bytes holds."""

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
        """Room for `resident` adapters of mean size, and for every adapter of the resident tenant at once."""
        sizes = [adapter_parameters(model, rank) * ITEM_BYTES[self.dtype] for rank in self.ranks]
        together = sum(sizes[index % len(sizes)] for index in range(self.resident))
        return max(self.resident * sum(sizes) // len(sizes), together)


async def measure_many(
    model: str, shape: ManyShape, settings: Mapping[str, str], say: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`."""
    budget = shape.budget_bytes(load_model_config(model))
    own = {"dtype": shape.dtype, "adapter_bytes": str(budget), **settings}
    report = Report("adapters", ("output_throughput", "runs", "distinct_adapters", "adapter_loads"))
    async with own_server(model, own) as server:
        tenants, pool = await _register(server, shape, report, say)
        await _warm(server, tenants[RESIDENT], pool, shape)
        results: dict[str, list[LoadResult]] = {RESIDENT: [], MANY: []}
        loads = {RESIDENT: 0, MANY: 0}
        counted = await _adapter_loads(server.base_url)
        for repeat in range(shape.repeats):
            for kind, runs in results.items():
                say(f"round {repeat + 1} of {shape.repeats}: {kind}")
                requests = _requests(shape, kind, tenants[kind], pool, repeat)
                result = await run_load(server.base_url, requests, shape.concurrency)
                runs.append(result.require_complete())
                before, counted = counted, await _adapter_loads(server.base_url)
                loads[kind] += counted - before
        say(f"repeating {shape.samples} answers alone")
        parity = await compare_alone(server.base_url, results[MANY][-1], shape.samples)
    _summarize(report, shape, budget, results, loads)
    parity.add_to(report)
    return report


async def _register(
    server: OwnServer, shape: ManyShape, report: Report, say: Callable[[str], None]
) -> tuple[dict[str, BenchTenant], list[int]]:
    async with registration(server) as accounts:
        tenants = {MANY: await accounts.tenant("many"), RESIDENT: await accounts.tenant("resident")}
        for kind, count in ((MANY, shape.registered), (RESIDENT, shape.resident)):
            say(f"registering {count} adapters ({kind})")
            ranks = [shape.ranks[index % len(shape.ranks)] for index in range(count)]
            pushes = await accounts.push_random(tenants[kind], ranks)
            report.notes.append(f"{kind}: {pushes.note()}")
        return tenants, await token_pool(server.base_url, tenants[MANY].api_key, BASE_MODEL)


async def _warm(server: OwnServer, tenant: BenchTenant, pool: Sequence[int], shape: ManyShape) -> None:
    """Every adapter of the resident tenant once, so that its first round finds them on the device."""
    prompts = draw_prompts(pool, shape.resident, shape.input_len, seed=-1)
    requests = [
        CompletionRequest(adapter_name(index), prompt, 8, tenant.api_key)
        for index, prompt in enumerate(prompts)
    ]
    (await run_load(server.base_url, requests, shape.concurrency)).require_complete()


async def _adapter_loads(base_url: str) -> int:
    """How many adapters the server has brought to the device since it started, by its own count."""
    await asyncio.sleep(COUNTERS_SETTLE_S)
    async with httpx.AsyncClient(base_url=base_url) as client:
        text = (await client.get("/metrics")).text
    counts = [line for line in text.splitlines() if line.startswith("loraplex_adapter_loads_total")]
    return round(sum(float(line.rpartition(" ")[2]) for line in counts))


def _requests(
    shape: ManyShape, kind: str, tenant: BenchTenant, pool: Sequence[int], repeat: int
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
    shape: ManyShape,
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
class Parity:
    """`margins`: log-probability margin at the first differing token of every answer that differs."""

    compared: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def explained(self) -> int:
        """Answers that are equal or differ first where the margin is below `MARGIN`."""
        return self.compared - sum(margin > MARGIN for margin in self.margins)

    def add_to(self, report: Report) -> None:
        """As a case and a ratio."""
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


async def compare_alone(base_url: str, crowd: LoadResult, samples: int) -> Parity:
    """Repeat every n-th request of `crowd` alone, with log-probabilities. Raises `BenchFailed`."""
    parity = Parity()
    step = max(len(crowd.requests) // max(samples, 1), 1)
    for index in range(0, len(crowd.requests), step)[:samples]:
        request = replace(crowd.requests[index], options={"logprobs": 2})
        alone = (await run_load(base_url, [request])).require_complete().answers[0]
        parity.compared += 1
        if (margin := margin_at_difference(crowd.answers[index].text, alone)) is not None:
            parity.margins.append(margin)
    return parity


def margin_at_difference(text: str, alone: Answer) -> float | None:
    """Margin of the lone run's two best tokens where `text` leaves it; None when the texts are equal."""
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
