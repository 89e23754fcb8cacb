"""What a tenant gets beside another one that offers ten times its share, and how two backlogged tenants share an engine.

Invariant: all rates of a round follow from the capacity measured just before it on the same server. The other tenant's client is
a process of its own, so that the quiet one's clock waits for no event loop but its own.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import httpx
from tests.benchmarks.tenant_load import Offered, OfferJob, begin_offer, end_offer

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.platform.bench.client import CompletionRequest, StreamRecord, decode, stream_completion
from loraplex.platform.bench.fixtures import (
    BenchTenant,
    adapter_name,
    open_fixtures,
    token_pool,
    write_random_adapter,
)
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets, draw_prompts

FAIR, TENFOLD = "the other tenant at its share", "the other tenant at ten times its share"
COLUMNS = (
    "p50_ttft_ms",
    "p99_ttft_ms",
    "requests",
    "offered_per_s",
    "refused",
    "late_ms",
    "capacity_per_s",
    "rounds_repeated",
    "jain",
    "shares",
)
REQUIRED_RATIO, REQUIRED_JAIN = 1.5, 0.95
# All clients have one address: its bound of connections, from which proxies are exempt, would refuse the quiet tenant for the other.
CONNECTIONS = {"max_connections": "16384", "trusted_proxies": "127.0.0.1/32"}
OUTPUT_COST = 2.0
"""An output token in prompt tokens, as the scheduler charges it (`engine/scheduling/fairness.py`)."""
MAX_SPEED_CHANGE = 1.15
"""Of the capacity within a round; beyond it the offered rates are no shares any more, and the round is repeated."""
QUIET_ADAPTERS, RANK = 4, 16
MIN_ADAPTERS = 48
"""A quarter of them has two places more than `QUIET_ADAPTERS` and the eighth that is sent at the other one's share."""
WARM_UP_S = 5.0
IDLE_S = 60.0
WAITING_OR_RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareShape:
    """Two tenants: half of the capacity is the share of each. The quiet one offers `quiet_load` of the capacity for `seconds`,
    after the other one has offered for `lead_s`.

    `backlog` requests of each tenant are in flight in the cases of backlogged tenants, whose weights are `weights`, and half as
    many where the capacity is measured. With `adapters`, the quiet one's requests are for one of `QUIET_ADAPTERS`, the other
    one's for one of `adapters` at ten times its share and of an eighth of them at its share; a quarter of them fit in memory.
    """

    seconds: float = 15.0
    lead_s: float = 3.0
    capacity_s: float = 8.0
    rounds: int = 6
    input_len: int = 60
    output_len: int = 32
    quiet_load: float = 0.4
    backlog: int = 48
    weights: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.0, 3.0))
    dtype: str = "bfloat16"
    adapters: int = 0

    def models(self, adapters: int) -> list[str]:
        """The names that a tenant with so many adapters sends."""
        return [adapter_name(index) for index in range(adapters)] if self.adapters else [BASE_MODEL]


@dataclass(frozen=True, slots=True)
class _World:
    """A running server, and prompts of its vocabulary."""

    server: LocalServer
    shape: FairShareShape
    pool: Sequence[int]

    def requests(self, tenant: BenchTenant, number: int, seed: int) -> list[CompletionRequest]:
        prompts = draw_prompts(self.pool, number, self.shape.input_len, seed)
        models = random.Random(seed).choices(self.shape.models(QUIET_ADAPTERS), k=number)
        return [
            CompletionRequest(model, prompt, self.shape.output_len, tenant.api_key)
            for model, prompt in zip(models, prompts, strict=True)
        ]


@dataclass(slots=True)
class CaseTimes:
    """The quiet tenant's times to first token in seconds, and what the other one offered."""

    first_tokens: list[float] = field(default_factory=list)
    offered: list[Offered] = field(default_factory=list)

    def add(self, other: "CaseTimes") -> None:
        self.first_tokens += other.first_tokens
        self.offered += other.offered

    def figure(self) -> dict[str, float]:
        """The figures of a case."""
        return {
            "p50_ttft_ms": percentile(self.first_tokens, 50) * 1000,
            "p99_ttft_ms": percentile(self.first_tokens, 99) * 1000,
            "requests": len(self.first_tokens),
            "offered_per_s": fmean(offered.rate for offered in self.offered),
            "refused": sum(sum(offered.failed.values()) for offered in self.offered),
            "late_ms": max(offered.late_s for offered in self.offered) * 1000,
        }


async def measure_fair_share(
    model: str, shape: FairShareShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`, also if a request of the quiet tenant fails."""
    report = Report("fair-share", COLUMNS)
    settings = {"dtype": shape.dtype, **CONNECTIONS, **_adapter_memory(model, shape), **settings}
    async with run_local_server(model, settings) as server:
        async with open_fixtures(server) as fixtures:
            quiet, loud = await fixtures.tenant("quiet"), await fixtures.tenant("loud")
            pairs = [
                (await fixtures.tenant(f"first-{i}", one), await fixtures.tenant(f"second-{i}", other))
                for i, (one, other) in enumerate(shape.weights)
            ]
            if shape.adapters:
                await fixtures.push_random(quiet, [RANK] * QUIET_ADAPTERS)
                await fixtures.push_random(loud, [RANK] * shape.adapters, seed=QUIET_ADAPTERS)
        world = _World(server, shape, await token_pool(server.base_url, quiet.api_key, BASE_MODEL))
        await _measure_quiet(world, quiet, loud, report, progress)
        if shape.adapters:
            return report
        for (one, other), weights in zip(pairs, shape.weights, strict=True):
            progress(f"both backlogged, weights {weights[0]:g} and {weights[1]:g}")
            await _measure_backlogged(world, (one, other), weights, report)
    return report


def _adapter_memory(model: str, shape: FairShareShape) -> dict[str, str]:
    """Return the setting with which a quarter of the adapters fits."""
    if not shape.adapters:
        return {}
    with TemporaryDirectory() as folder:
        write_random_adapter(Path(folder), load_model_config(model), RANK, 0)
        size = Path(folder, "adapter_model.safetensors").stat().st_size
    return {"adapter_bytes": str(size * shape.adapters // 4)}


async def _measure_quiet(
    world: _World, quiet: BenchTenant, loud: BenchTenant, report: Report, progress: Callable[[str], None]
) -> None:
    shape, times = world.shape, {FAIR: CaseTimes(), TENFOLD: CaseTimes()}
    capacities, by_round = list[float](), list[float]()
    warm_up = replace(world, shape=replace(shape, seconds=WARM_UP_S))
    await _measure_round(warm_up, quiet, loud, await _capacity(world, (quiet, loud), 0), 0)
    capacity = await _capacity(world, (quiet, loud), 1)
    for number in range(1, 2 * shape.rounds + 1):
        found = await _measure_round(world, quiet, loud, capacity, number)
        before, capacity = capacity, await _capacity(world, (quiet, loud), 1 + number)
        p99 = {name: percentile(found[name].first_tokens, 99) for name in times}
        line = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in p99.items())
        progress(f"round {number}: p99 TTFT, {line}; capacity {before:.1f}/s, then {capacity:.1f}/s")
        if max(before, capacity) > MAX_SPEED_CHANGE * min(before, capacity):
            progress("the machine's speed changed: another round")
            continue
        capacities.append(before)
        by_round.append(p99[TENFOLD] / p99[FAIR])
        for name, result in found.items():
            times[name].add(result)
        if len(capacities) == shape.rounds:
            break
    else:
        raise BenchFailed("the machine's speed changed in too many rounds: something else uses it")
    for name, result in times.items():
        figure = result.figure() | {
            "capacity_per_s": fmean(capacities),
            "rounds_repeated": number - shape.rounds,
        }
        report.cases.append(Case(name, asdict(shape), figure))
    ratio = percentile(times[TENFOLD].first_tokens, 99) / percentile(times[FAIR].first_tokens, 99)
    name = "p99 TTFT: ten times its share / its share" + (", with adapters" if shape.adapters else "")
    report.ratios.append(Ratio(name, ratio, REQUIRED_RATIO, "at most"))
    # The slowest of all may be those of one burst of the tenant's own, which costs as much beside either neighbour.
    report.ratios.append(Ratio(f"{name}, median of the rounds", median(by_round)))


async def _measure_round(
    world: _World, quiet: BenchTenant, loud: BenchTenant, capacity: float, number: int
) -> dict[str, CaseTimes]:
    """Both cases, in an order that alternates; no case repeats a prompt of an earlier one, which would be cached."""
    names = (FAIR, TENFOLD) if number % 2 else (TENFOLD, FAIR)
    found: dict[str, CaseTimes] = {}
    for place, name in enumerate(names):
        rate = capacity / 2 if name == FAIR else 5 * capacity
        found[name] = await _measure_case(world, quiet, loud, (capacity, rate), (number, 2 * number + place))
    return found


async def _capacity(world: _World, tenants: tuple[BenchTenant, BenchTenant], seed: int) -> float:
    """Requests per second that both tenants together get, half a backlog in flight each; the first quarter does not count."""
    shape = world.shape
    half = replace(world, shape=replace(shape, seconds=shape.capacity_s, backlog=shape.backlog // 2))
    served = await _serve_backlogs(half, tenants, (1_000_000 * (seed + 1), 1_000_000 * (seed + 1) + 500_000))
    return sum(served) / (0.75 * shape.capacity_s * (shape.input_len + OUTPUT_COST * shape.output_len))


async def _measure_case(
    world: _World, quiet: BenchTenant, loud: BenchTenant, rates: tuple[float, float], seeds: tuple[int, int]
) -> CaseTimes:
    """`rates`: the capacity, and what the other tenant offers. `seeds`: of the quiet tenant's arrivals, and of prompts."""
    shape = world.shape
    rate = shape.quiet_load * rates[0]
    arrivals = arrival_offsets(max(2, int(rate * shape.seconds)), rate, seeds[0])
    requests = world.requests(quiet, len(arrivals), 1000 + seeds[1])
    job = OfferJob(
        base_url=world.server.base_url,
        api_key=loud.api_key,
        models=shape.models(shape.adapters if rates[1] > rates[0] else shape.adapters // 8),
        pool=list(world.pool),
        input_len=shape.input_len,
        output_len=shape.output_len,
        rate=rates[1],
        seconds=6 * (shape.lead_s + shape.seconds),
        seed=2000 + seeds[1],
    )
    await _wait_idle(world.server.base_url)
    offering = await begin_offer(job)
    try:
        offsets = [shape.lead_s + offset for offset in arrivals]
        load = await run_load(world.server.base_url, requests, offsets=offsets)
    finally:
        offered = await end_offer(offering)
    await _wait_idle(world.server.base_url)
    completions = load.require_complete().completions
    return CaseTimes([completion.time_to_first_token for completion in completions], [offered])


async def _wait_idle(base_url: str) -> None:
    """Wait until the engine has no request: the next case meets nothing that the last one left."""
    async with asyncio.timeout(IDLE_S), httpx.AsyncClient(base_url=base_url) as client:
        while any(map(float, WAITING_OR_RUNNING.findall((await client.get("/metrics")).text))):
            await asyncio.sleep(0.25)


async def _measure_backlogged(
    world: _World, tenants: tuple[BenchTenant, BenchTenant], weights: tuple[float, float], report: Report
) -> None:
    shape = world.shape
    served = await _serve_backlogs(world, tenants, (10_000, 500_000))
    service = [each / weight for each, weight in zip(served, weights, strict=True)]
    jain = sum(service) ** 2 / (len(service) * sum(value**2 for value in service))
    figure = {"jain": jain, "shares": service[1] * weights[1] / (service[0] * weights[0])}
    name = f"both backlogged, weights {weights[0]:g} and {weights[1]:g}"
    report.cases.append(Case(name, asdict(shape), figure))
    report.ratios.append(Ratio(f"Jain index, {name}", jain, REQUIRED_JAIN, "at least"))


async def _serve_backlogs(
    world: _World, tenants: tuple[BenchTenant, BenchTenant], seeds: tuple[int, int]
) -> list[float]:
    """The service of each of two backlogged tenants, in prompt tokens, after the first quarter of `seconds`."""
    shape = world.shape
    began = time.perf_counter()
    until = began + shape.seconds
    records = await asyncio.gather(
        *(_backlog(world, tenant, seed, until) for tenant, seed in zip(tenants, seeds, strict=True))
    )
    window = (began + shape.seconds / 4, until)
    return [sum(map(partial(_cost, window=window), each)) for each in records]


async def _backlog(world: _World, tenant: BenchTenant, first_seed: int, until: float) -> list[StreamRecord]:
    """Keep `backlog` requests in flight until a time of `perf_counter`, and return all records, also of unfinished ones."""
    records: list[StreamRecord] = []
    seeds = count(first_seed)

    async def one_after_another() -> None:
        while time.perf_counter() < until:
            (request,) = world.requests(tenant, 1, next(seeds))
            records.append(StreamRecord(request))
            await stream_completion(world.server.base_url, request, records[-1])

    await asyncio.gather(*(one_after_another() for _ in range(world.shape.backlog)))
    return records


def _cost(record: StreamRecord, window: tuple[float, float]) -> float:
    """The service of a request within the window, in prompt tokens; its prompt counts with the first token."""
    completion = decode(record)
    if completion.error is not None:
        raise BenchFailed(f"a request of a backlogged tenant failed: {completion.error}")
    times = [record.sent_at + at for at in completion.token_times]
    if not times:
        return 0.0
    within = sum(window[0] <= at < window[1] for at in times) / len(times)
    prompt = completion.prompt_tokens if window[0] <= times[0] < window[1] else 0
    return prompt + OUTPUT_COST * completion.output_tokens * within
