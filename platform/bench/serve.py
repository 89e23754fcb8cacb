"""`bench serve`: one load against a running server, or against one of the benchmark's own with random adapters."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import adapter_name, registration, token_pool
from loraplex.platform.bench.latency_metrics import PERCENTILES, serving_figures
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, OwnServer, own_server
from loraplex.platform.bench.report import Case, Report
from loraplex.platform.bench.workload import Distribution, arrival_offsets, draw_prompts, pick_adapters

COLUMNS = (
    "completed",
    "failed",
    "request_throughput",
    "output_throughput",
    *(f"p{share}_{name}_ms" for name in ("ttft", "tpot", "itl") for share in PERCENTILES),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """`rate` in requests per second opens the loop. `prefix_share` of each prompt is common to its adapter's requests.

    `prompt` is a text in place of drawn tokens.
    """

    distribution: Distribution = "uniform"
    zipf: float = 1.1
    rate: float | None = None
    prefix_share: float = 0.0
    cancel_share: float = 0.0
    seed: int = 0
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Lengths in tokens. Without adapters every tenant uses the base model."""

    concurrency: int = 16
    num_requests: int = 64
    input_len: int = 60
    output_len: int = 64
    adapters: int = 0
    rank: int = 16
    tenants: int = 1
    traffic: Traffic = Traffic()

    def warm_up(self, targets: int) -> "LoadShape":
        """One short request to each target, with prompts of its own."""
        traffic = replace(
            self.traffic, distribution="distinct", cancel_share=0.0, seed=self.traffic.seed + 1_000_000
        )
        return replace(self, num_requests=targets, output_len=4, traffic=traffic)


@dataclass(frozen=True, slots=True)
class Target:
    """A model to name in a request and the key of the tenant that may."""

    model: str
    api_key: str = field(repr=False)


def make_requests(
    shape: LoadShape, targets: Sequence[Target], pool: Sequence[int]
) -> list[CompletionRequest]:
    """The load's requests over `targets`, in the order of their arrival."""
    traffic, seed = shape.traffic, shape.traffic.seed
    picks = pick_adapters(len(targets), shape.num_requests, traffic.distribution, traffic.zipf, seed)
    common = round(shape.input_len * traffic.prefix_share)
    prefixes = draw_prompts(pool, len(targets), common, seed + 1)
    generator = random.Random(seed + 2)
    requests = []
    for index, pick in enumerate(picks):
        prompt = draw_prompts(pool, 1, shape.input_len, (seed + 3) * 1_000_003 + index, prefixes[pick])[0]
        leaves = generator.random() < traffic.cancel_share
        request = CompletionRequest(
            model=targets[pick].model,
            prompt=traffic.prompt or prompt,
            output_len=shape.output_len,
            api_key=targets[pick].api_key,
            cancel_after=generator.randint(1, max(shape.output_len - 1, 1)) if leaves else None,
        )
        requests.append(request)
    return requests


async def load_foreign(
    base_url: str, targets: Sequence[Target], shape: LoadShape, objectives: Mapping[str, float]
) -> Report:
    """Against a server that runs already. Raises `BenchFailed`."""
    pool = await token_pool(base_url, targets[0].api_key, targets[0].model)
    return _report(shape, await _run(base_url, targets, shape, pool), objectives)


async def load_own(
    model: str,
    settings: Mapping[str, str],
    shape: LoadShape,
    objectives: Mapping[str, float],
    say: Callable[[str], None],
) -> Report:
    """Against a server started for it, warmed up by one request per target. Raises `BenchFailed`."""
    async with own_server(model, settings) as server:
        targets = await _register(server, shape, say)
        pool = await token_pool(server.base_url, targets[0].api_key, BASE_MODEL)
        requests = make_requests(shape.warm_up(len(targets)), targets, pool)
        (await run_load(server.base_url, requests, shape.concurrency)).require_complete()
        return _report(shape, await _run(server.base_url, targets, shape, pool), objectives)


async def _register(server: OwnServer, shape: LoadShape, say: Callable[[str], None]) -> list[Target]:
    """Adapters spread over the tenants in turn; without adapters every tenant uses the base model."""
    async with registration(server) as accounts:
        tenants = [await accounts.tenant(f"bench-{index}") for index in range(shape.tenants)]
        if shape.adapters == 0:
            return [Target(BASE_MODEL, tenant.api_key) for tenant in tenants]
        targets: list[tuple[int, Target]] = []
        for index, tenant in enumerate(tenants):
            count = len(range(index, shape.adapters, shape.tenants))
            pushes = await accounts.push_random(tenant, [shape.rank] * count, seed=index * 1_000_000)
            say(f"{tenant.name}: {pushes.note()}")
            targets += [(number, Target(adapter_name(number), tenant.api_key)) for number in range(count)]
        # The most frequent targets of a skewed load belong to all tenants, not to the first one.
        return [target for _, target in sorted(targets, key=lambda item: item[0])]


async def _run(base_url: str, targets: Sequence[Target], shape: LoadShape, pool: Sequence[int]) -> LoadResult:
    requests = make_requests(shape, targets, pool)
    offsets = arrival_offsets(shape.num_requests, shape.traffic.rate, shape.traffic.seed)
    return await run_load(base_url, requests, None if shape.traffic.rate else shape.concurrency, offsets)


def _report(shape: LoadShape, result: LoadResult, objectives: Mapping[str, float]) -> Report:
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
    report.cases.append(Case(name, asdict(shape), asked | serving_figures(result, objectives)))
    errors = sorted({answer.error for answer in result.answers if answer.error is not None})
    report.notes += [f"error: {error}" for error in errors[:5]]
    return report
