"""`bench cache`: time to first token of a long prefix when it is new, when it is known, and for another tenant."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loraplex.platform.bench.client import Answer, CompletionRequest
from loraplex.platform.bench.fixtures import BenchTenant, registration, token_pool
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.local_server import BASE_MODEL, own_server
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts

COLD, WARM, OTHER = "first request", "second request", "another tenant"
REQUIRED_SPEEDUP = 5.0
REQUIRED_MISS = 0.8
COLUMNS = ("median_ttft_ms", "cached_tokens", "expected_cached_tokens")


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """`prefixes` distinct ones, one after another; each request adds `suffix_len` tokens of its own."""

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


async def measure_prefix_cache(model: str, shape: PrefixShape, settings: Mapping[str, str]) -> Report:
    """Raises `BenchFailed`."""
    own = {"dtype": shape.dtype, "kv_block_size": str(shape.block_size), **settings}
    answers: dict[str, list[Answer]] = {COLD: [], WARM: [], OTHER: []}
    async with own_server(model, own) as server:
        async with registration(server) as accounts:
            owner, stranger = await accounts.tenant("owner"), await accounts.tenant("stranger")
        pool = await token_pool(server.base_url, owner.api_key, BASE_MODEL)
        for index in range(shape.prefixes + 1):  # the first one warms up
            found = await _three(server.base_url, shape, pool, (owner, stranger), index)
            for name, answer in found.items() if index else ():
                answers[name].append(answer)
    return _report(shape, answers)


async def _three(
    base_url: str,
    shape: PrefixShape,
    pool: Sequence[int],
    tenants: tuple[BenchTenant, BenchTenant],
    seed: int,
) -> dict[str, Answer]:
    owner, stranger = tenants
    prefix = draw_prompts(pool, 1, shape.prefix_len, seed)[0]
    length = shape.prefix_len + shape.suffix_len
    first, second = draw_prompts(pool, 2, length, seed + 1_000_000, prefix)
    plan = {COLD: (first, owner), WARM: (second, owner), OTHER: (second, stranger)}
    found = {}
    for name, (prompt, tenant) in plan.items():
        request = CompletionRequest(BASE_MODEL, prompt, shape.output_len, tenant.api_key)
        found[name] = (await run_load(base_url, [request])).require_complete().answers[0]
    return found


def _report(shape: PrefixShape, answers: Mapping[str, Sequence[Answer]]) -> Report:
    report = Report("cache", COLUMNS)
    times: dict[str, float] = {}
    wrong = 0
    for name, found in answers.items():
        expected = shape.shared_tokens if name == WARM else 0
        times[name] = median([answer.time_to_first_token for answer in found])
        cached = sorted({answer.cached_tokens for answer in found})
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
