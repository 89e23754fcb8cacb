"""`bench cache`: time to first token of a long prefix that is new, that is cached, and that another tenant cached."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loraplex.platform.bench.client import Completion, CompletionRequest
from loraplex.platform.bench.fixtures import BenchTenant, open_fixtures, token_pool
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts
from loraplex.platform.processes.progress import Progress

COLD, WARM, OTHER = "first request", "second request", "another tenant"
REQUIRED_SPEEDUP = 5.0
REQUIRED_MISS = 0.8
COLUMNS = ("median_ttft_ms", "cached_tokens", "expected_cached_tokens")


@dataclass(frozen=True, slots=True)
class PrefixCacheShape:
    """`prefixes` distinct ones, one after another; each request appends `suffix_len` other tokens."""

    prefix_len: int = 1000
    suffix_len: int = 8
    output_len: int = 4
    prefixes: int = 5
    dtype: str = "bfloat16"
    block_size: int = 16

    @property
    def shared_tokens(self) -> int:
        """Tokens of the full blocks of the prefix."""
        return self.prefix_len // self.block_size * self.block_size


async def measure_prefix_cache(
    model: str, shape: PrefixCacheShape, settings: Mapping[str, str], progress: Progress
) -> Report:
    """Raises `BenchFailed`."""
    own = {"dtype": shape.dtype, **settings}
    completions: dict[str, list[Completion]] = {COLD: [], WARM: [], OTHER: []}
    progress("starting the server")
    async with run_local_server(model, own) as server:
        async with open_fixtures(server) as fixtures:
            owner, other = await fixtures.tenant("owner"), await fixtures.tenant("other")
        pool = await token_pool(server.base_url, owner.api_key, BASE_MODEL)
        for index in range(shape.prefixes + 1):  # the first one warms up
            progress("sending prompts", index / (shape.prefixes + 1))
            found = await _three(server.base_url, shape, pool, (owner, other), index)
            for name, completion in found.items() if index else ():
                completions[name].append(completion)
    return _report(shape, completions)


async def _three(
    base_url: str,
    shape: PrefixCacheShape,
    pool: Sequence[int],
    tenants: tuple[BenchTenant, BenchTenant],
    seed: int,
) -> dict[str, Completion]:
    owner, other = tenants
    prefix = draw_prompts(pool, 1, shape.prefix_len, seed)[0]
    length = shape.prefix_len + shape.suffix_len
    first, second = draw_prompts(pool, 2, length, seed + 1_000_000, prefix)
    plan = {COLD: (first, owner), WARM: (second, owner), OTHER: (second, other)}
    found = {}
    for name, (prompt, tenant) in plan.items():
        request = CompletionRequest(BASE_MODEL, prompt, shape.output_len, tenant.api_key)
        found[name] = (await run_load(base_url, [request])).require_complete().completions[0]
    return found


def _report(shape: PrefixCacheShape, completions: Mapping[str, Sequence[Completion]]) -> Report:
    report = Report("cache", COLUMNS)
    times: dict[str, float] = {}
    wrong = 0
    for name, found in completions.items():
        expected = shape.shared_tokens if name == WARM else 0
        times[name] = median([completion.time_to_first_token for completion in found])
        cached = sorted({completion.cached_tokens for completion in found})
        wrong += cached != [expected]
        figure = {
            "median_ttft_ms": times[name] * 1000,
            "cached_tokens": cached,
            "expected_cached_tokens": expected,
        }
        report.cases.append(Case(name, asdict(shape), figure))
    report.ratios += [
        Ratio(f"time to first token: {COLD} / {WARM}", times[COLD] / times[WARM], REQUIRED_SPEEDUP),
        Ratio(f"time to first token: {OTHER} / {COLD}", times[OTHER] / times[COLD], REQUIRED_MISS),
        Ratio("kinds of request with wrong `cached_tokens`", float(wrong), 0.0, "at most"),
    ]
    return report
