"""What a tenant gets beside another one that offers ten times its share, and how two backlogged tenants share an engine.

Invariant: all rates follow from a capacity that is measured on the same server, in the same run.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count

from loraplex.platform.bench.client import CompletionRequest, StreamRecord, decode, stream_completion
from loraplex.platform.bench.fixtures import BenchTenant, open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets, draw_prompts

FAIR, TENFOLD = "the other tenant at its share", "the other tenant at ten times its share"
COLUMNS = (
    "p50_ttft_ms",
    "p99_ttft_ms",
    "requests",
    "errors",
    "offered_per_s",
    "capacity_per_s",
    "jain",
    "shares",
)
REQUIRED_RATIO, REQUIRED_JAIN = 1.5, 0.95
# All clients have one address: the bound of connections per address would refuse the quiet tenant for the other one's.
CONNECTIONS = {"max_connections": "16384", "max_connections_per_address": "16384"}
OUTPUT_COST = 2.0
"""An output token in prompt tokens, as the scheduler charges it (`engine/scheduling/fairness.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairShareShape:
    """Two tenants: half of the capacity is the share of each. The quiet one offers `quiet_load` of the capacity.

    `backlog` requests of each tenant are in flight in the cases of backlogged tenants, whose weights are `weights`.
    """

    seconds: float = 20.0
    rounds: int = 3
    input_len: int = 60
    output_len: int = 32
    quiet_load: float = 0.4
    backlog: int = 48
    weights: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.0, 3.0))
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class _World:
    """A running server, and prompts of its vocabulary."""

    server: LocalServer
    shape: FairShareShape
    pool: Sequence[int]

    def requests(self, tenant: BenchTenant, number: int, seed: int) -> list[CompletionRequest]:
        prompts = draw_prompts(self.pool, number, self.shape.input_len, seed)
        return [
            CompletionRequest(BASE_MODEL, prompt, self.shape.output_len, tenant.api_key) for prompt in prompts
        ]


async def measure_fair_share(
    model: str, shape: FairShareShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`, also if a request of the quiet tenant fails."""
    report = Report("fair-share", COLUMNS)
    async with run_local_server(model, {"dtype": shape.dtype, **CONNECTIONS, **settings}) as server:
        async with open_fixtures(server) as fixtures:
            quiet, loud = await fixtures.tenant("quiet"), await fixtures.tenant("loud")
            pairs = [
                (await fixtures.tenant(f"first-{i}", one), await fixtures.tenant(f"second-{i}", other))
                for i, (one, other) in enumerate(shape.weights)
            ]
        world = _World(server, shape, await token_pool(server.base_url, quiet.api_key, BASE_MODEL))
        progress("capacity")
        capacity = await _capacity(world, loud)
        await _measure_quiet(world, quiet, loud, capacity, report, progress)
        for (one, other), weights in zip(pairs, shape.weights, strict=True):
            progress(f"both backlogged, weights {weights[0]:g} and {weights[1]:g}")
            await _measure_backlogged(world, (one, other), weights, report)
    return report


async def _capacity(world: _World, tenant: BenchTenant) -> float:
    """Requests per second of a closed loop; the first half warms up."""
    rate = 0.0
    for seed in range(2):
        requests = world.requests(tenant, 4 * world.shape.backlog, seed)
        load = (await run_load(world.server.base_url, requests, world.shape.backlog)).require_complete()
        rate = len(requests) / load.duration
    return rate


async def _measure_quiet(
    world: _World,
    quiet: BenchTenant,
    loud: BenchTenant,
    capacity: float,
    report: Report,
    progress: Callable[[str], None],
) -> None:
    shape, times = world.shape, dict[str, list[float]]()
    for number in range(shape.rounds + 1):  # the first round warms up
        for place, (name, offered) in enumerate(((FAIR, capacity / 2), (TENFOLD, 5 * capacity))):
            progress(f"round {number} of {shape.rounds}: {name}")
            seed = 2 * number + place  # No case repeats a prompt of an earlier one, which would be cached.
            async with _offer(world, loud, offered, seed):
                rate = shape.quiet_load * capacity
                offsets = arrival_offsets(max(2, int(rate * shape.seconds)), rate, number)
                requests = world.requests(quiet, len(offsets), 1000 + seed)
                load = await run_load(world.server.base_url, requests, offsets=offsets)
            if number:
                times.setdefault(name, []).extend(_first_tokens(load))
    for name, offered in ((FAIR, capacity / 2), (TENFOLD, 5 * capacity)):
        figure = {
            "p50_ttft_ms": percentile(times[name], 50) * 1000,
            "p99_ttft_ms": percentile(times[name], 99) * 1000,
            "requests": len(times[name]),
            "offered_per_s": offered,
            "capacity_per_s": capacity,
        }
        report.cases.append(Case(name, asdict(shape), figure))
    ratio = percentile(times[TENFOLD], 99) / percentile(times[FAIR], 99)
    report.ratios.append(Ratio("p99 TTFT: ten times its share / its share", ratio, REQUIRED_RATIO, "at most"))


def _first_tokens(load: LoadResult) -> list[float]:
    return [completion.time_to_first_token for completion in load.require_complete().completions]


@asynccontextmanager
async def _offer(world: _World, tenant: BenchTenant, rate: float, seed: int) -> AsyncIterator[None]:
    """Offer requests in an open loop while the block runs, whatever becomes of them; what is left is cancelled."""
    number = int(2 * rate * world.shape.seconds)
    requests = world.requests(tenant, number, 2000 + seed)
    offered = asyncio.create_task(
        run_load(world.server.base_url, requests, offsets=arrival_offsets(number, rate, 3000 + seed))
    )
    try:
        yield
        if offered.done():
            raise BenchFailed("the other tenant's requests ended before those of the quiet one")
    finally:
        offered.cancel()
        await asyncio.gather(offered, return_exceptions=True)


async def _measure_backlogged(
    world: _World, tenants: tuple[BenchTenant, BenchTenant], weights: tuple[float, float], report: Report
) -> None:
    shape = world.shape
    began = time.perf_counter()
    until = began + shape.seconds
    served = await asyncio.gather(
        *(
            _backlog(world, tenant, seed, until)
            for tenant, seed in zip(tenants, (10_000, 500_000), strict=True)
        )
    )
    window = (began + shape.seconds / 4, until)
    service = [sum(map(partial(_cost, window=window), records)) / w for records, w in zip(served, weights)]
    jain = sum(service) ** 2 / (len(service) * sum(value**2 for value in service))
    figure = {"jain": jain, "shares": service[1] * weights[1] / (service[0] * weights[0])}
    name = f"both backlogged, weights {weights[0]:g} and {weights[1]:g}"
    report.cases.append(Case(name, asdict(shape), figure))
    report.ratios.append(Ratio(f"Jain index, {name}", jain, REQUIRED_JAIN, "at least"))


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
