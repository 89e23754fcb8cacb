"""`bench serve`: the load generator, against a running server or against a local one with random adapters."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeAlias
from uuid import uuid4

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import adapter_name, open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import PERCENTILES, serving_metrics
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, LocalServer, run_local_server
from loraplex.platform.bench.mixes import Mix
from loraplex.platform.bench.report import Case, Report
from loraplex.platform.bench.workload import Distribution, arrival_offsets, draw_prompts, pick_adapters
from loraplex.platform.processes.progress import Progress

COLUMNS = (
    "completed",
    "failed",
    "request_throughput",
    "output_throughput",
    *(f"p{share}_{name}_ms" for name in ("ttft", "tpot", "itl") for share in PERCENTILES),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """With `rate`, in requests per second, the loop is open.

    `prefix_share` of each prompt is common to all requests of its adapter. `prompt` replaces the drawn tokens by a text, and
    `mix` by chats with lengths of their own.
    """

    distribution: Distribution = "uniform"
    zipf: float = 1.1
    rate: float | None = None
    prefix_share: float = 0.0
    cancel_share: float = 0.0
    seed: int = 0
    prompt: str | None = None
    mix: Mix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeShape:
    """Lengths in tokens. Without adapters every tenant uses the base model."""

    concurrency: int = 16
    num_requests: int = 64
    input_len: int = 60
    output_len: int = 64
    adapters: int = 0
    rank: int = 16
    tenants: int = 1
    traffic: Traffic = Traffic()

    def warm_up(self, targets: int) -> "ServeShape":
        """One short request to each target, with other prompts."""
        traffic = replace(
            self.traffic,
            distribution="distinct",
            cancel_share=0.0,
            seed=self.traffic.seed + 1_000_000,
            mix=None,
        )
        return replace(self, num_requests=targets, output_len=4, traffic=traffic)


@dataclass(frozen=True, slots=True)
class Target:
    """A model name and an API key that may request it."""

    model: str
    api_key: str = field(repr=False)


def make_requests(
    shape: ServeShape, targets: Sequence[Target], pool: Sequence[int]
) -> list[CompletionRequest]:
    """Draw the requests of the load over `targets`, in the order of their arrival."""
    traffic, seed = shape.traffic, shape.traffic.seed
    picks = pick_adapters(len(targets), shape.num_requests, traffic.distribution, traffic.zipf, seed)
    common = round(shape.input_len * traffic.prefix_share)
    prefixes = draw_prompts(pool, len(targets), common, seed + 1)
    generator = random.Random(seed + 2)
    requests = []
    for index, pick in enumerate(picks):
        prompt: str | Sequence[int] = draw_prompts(
            pool, 1, shape.input_len, (seed + 3) * 1_000_003 + index, prefixes[pick]
        )[0]
        output_len = shape.output_len
        if traffic.mix is not None:
            prompt, output_len = traffic.mix.draw(seed, index, pick)
        leaves = generator.random() < traffic.cancel_share
        request = CompletionRequest(
            model=targets[pick].model,
            prompt=traffic.prompt or prompt,
            output_len=output_len,
            api_key=targets[pick].api_key,
            cancel_after=generator.randint(1, max(output_len - 1, 1)) if leaves else None,
            options={} if traffic.mix is None else traffic.mix.options(index),
            chat=traffic.mix is not None,
            request_id=uuid4().hex,
        )
        requests.append(request)
    return requests


@dataclass(frozen=True, slots=True)
class ServerUnderLoad:
    """A server, the targets of its load, and the token ids of which prompts are drawn."""

    base_url: str
    targets: Sequence[Target]
    pool: Sequence[int]
    progress: Progress

    async def run(self, shape: ServeShape, seed: int | None = None) -> LoadResult:
        """Load it until the last response ends. `seed` draws other prompts, for the arrivals of the shape's own seed."""
        offsets = arrival_offsets(shape.num_requests, shape.traffic.rate, shape.traffic.seed)
        if seed is not None:
            shape = replace(shape, traffic=replace(shape.traffic, seed=seed))
        requests = make_requests(shape, self.targets, self.pool)
        concurrency = None if shape.traffic.rate else shape.concurrency
        stage = f"sending {len(requests)} requests"
        self.progress(stage)
        return await run_load(self.base_url, requests, concurrency, offsets, partial(self.progress, stage))


Measure: TypeAlias = Callable[[ServerUnderLoad], Awaitable[Report]]


async def load_running_server(
    base_url: str, targets: Sequence[Target], measure: Measure, progress: Progress
) -> Report:
    """Measure a server that runs already. Raises `BenchFailed`."""
    pool = await token_pool(base_url, targets[0].api_key, targets[0].model)
    return await measure(ServerUnderLoad(base_url, targets, pool, progress))


async def load_local_server(
    model: str,
    settings: Mapping[str, str],
    shape: ServeShape,
    measure: Measure,
    progress: Progress,
) -> Report:
    """Start a server with the shape's adapters, warm it up with one request per target, and measure. Raises `BenchFailed`."""
    progress("starting the server")
    async with run_local_server(model, settings) as server:
        targets = await _register(server, shape, progress)
        pool = await token_pool(server.base_url, targets[0].api_key, BASE_MODEL)
        requests = make_requests(shape.warm_up(len(targets)), targets, pool)
        progress("warming up")
        (await run_load(server.base_url, requests, shape.concurrency)).require_complete()
        return await measure(ServerUnderLoad(server.base_url, targets, pool, progress))


async def _register(server: LocalServer, shape: ServeShape, progress: Progress) -> list[Target]:
    """Distribute the adapters over the tenants round-robin; without adapters every tenant uses the base model."""
    async with open_fixtures(server) as fixtures:
        tenants = [await fixtures.tenant(f"bench-{index}") for index in range(shape.tenants)]
        if shape.adapters == 0:
            return [Target(BASE_MODEL, tenant.api_key) for tenant in tenants]
        targets: list[tuple[int, Target]] = []
        for index, tenant in enumerate(tenants):
            count = len(range(index, shape.adapters, shape.tenants))
            pushes = await fixtures.push_random(tenant, [shape.rank] * count, seed=index * 1_000_000)
            progress(f"{tenant.name}: {pushes.note()}")
            targets += [(number, Target(adapter_name(number), tenant.api_key)) for number in range(count)]
        # The most frequent targets of a skewed load belong to all tenants, not only to the first one.
        return [target for _, target in sorted(targets, key=lambda item: item[0])]


def serve_report(shape: ServeShape, result: LoadResult, objectives: Mapping[str, float]) -> Report:
    """The figures of one load, and the errors of it."""
    report = Report("serve", COLUMNS)
    rate = shape.traffic.rate
    name = (
        f"{shape.adapters or 'no'} adapters, {f'{rate:g} per s' if rate else f'{shape.concurrency} at once'}"
    )
    asked = {
        "num_prompts": shape.num_requests,
        "request_rate": rate or "inf",
        "max_concurrency": None if rate else shape.concurrency,
    }
    report.cases.append(Case(name, asdict(shape), asked | serving_metrics(result, objectives)))
    errors = sorted({completion.error for completion in result.completions if completion.error is not None})
    report.notes += [f"error: {error}" for error in errors[:5]]
    return report
