"""TTFT and errors of one tenant while another client attacks the server, against the same attacker loading a stub.

Invariant: in both cases the attacker is a process of its own that runs the same code on the same cores at the same time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

import msgspec
from tests.benchmarks.attackers.job import AttackJob
from tests.benchmarks.attackers.registry import ATTACKERS
from tests.benchmarks.child import end_child, start_child

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import arrival_offsets, draw_prompts

CONTROL, ATTACKED = "attacker at a stub", "attacked"
COLUMNS = ("p50_ttft_ms", "p99_ttft_ms", "requests", "errors", "attacks")
REQUIRED_RATIO = 1.5
STOP_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackShape:
    """A tenant sends `rate` requests per second for `seconds` in each of `rounds` rounds of both cases."""

    attacks: tuple[str, ...] = tuple(ATTACKERS)
    rate: float = 4.0
    seconds: float = 20.0
    rounds: int = 3
    input_len: int = 60
    output_len: int = 8
    dtype: str = "bfloat16"


@dataclass(slots=True)
class CaseResult:
    """Times to first token in seconds, errors of the tenant by text, and responses to the attacker by status."""

    first_tokens: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)

    def add(self, load: LoadResult, attacks: Mapping[str, int]) -> None:
        for completion in load.completions:
            if completion.complete and completion.token_times:
                self.first_tokens.append(completion.time_to_first_token)
            else:
                self.errors[(completion.error or "no token")[:200]] += 1
        self.attacks.update(attacks)


async def measure_attacks(
    model: str, shape: AttackShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Measure each attack on a server of its own. Raises `BenchFailed`."""
    report = Report("attacks", COLUMNS)
    for attack in shape.attacks:
        results = await _measure_one(model, attack, shape, settings, progress)
        _summarize(report, attack, shape, results)
    return report


async def _measure_one(
    model: str, attack: str, shape: AttackShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> dict[str, CaseResult]:
    results = {CONTROL: CaseResult(), ATTACKED: CaseResult()}
    async with run_local_server(model, {"dtype": shape.dtype, **settings}) as server, run_stub() as stub:
        async with open_fixtures(server) as fixtures:
            tenant, attacker = await fixtures.tenant("tenant"), await fixtures.tenant("attacker")
        pool = await token_pool(server.base_url, tenant.api_key, BASE_MODEL)
        for number in range(shape.rounds + 1):  # the first round warms up
            for name, target in ((CONTROL, stub), (ATTACKED, server.base_url)):
                progress(f"{attack}, round {number} of {shape.rounds}: {name}")
                offsets = arrival_offsets(int(shape.rate * shape.seconds), shape.rate, number)
                prompts = draw_prompts(pool, len(offsets), shape.input_len, number)
                requests = [
                    CompletionRequest(BASE_MODEL, prompt, shape.output_len, tenant.api_key)
                    for prompt in prompts
                ]
                job = AttackJob(attack, target, attacker.api_key, BASE_MODEL, number, shape.seconds)
                async with run_attacker(job) as attacks:
                    load = await run_load(server.base_url, requests, offsets=offsets)
                if number:
                    results[name].add(load, attacks)
    return results


@asynccontextmanager
async def run_attacker(job: AttackJob) -> AsyncIterator[Counter[str]]:
    """Run the attacker's process beside the block; afterwards the counter has its outcome."""
    counted: Counter[str] = Counter()
    process = await start_child("tests.benchmarks.attackers", msgspec.json.encode(job))
    ending = asyncio.create_task(end_child(process, job.seconds + STOP_S))
    try:
        yield counted
    finally:
        counted.update(msgspec.json.decode(await ending, type=dict[str, int]))


@asynccontextmanager
async def run_stub() -> AsyncIterator[str]:
    """The address of a server that reads each request and answers it without work."""
    process = await start_child("tests.benchmarks.stub_server", b"")
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        await end_child(process, STOP_S)


def _summarize(report: Report, attack: str, shape: AttackShape, results: Mapping[str, CaseResult]) -> None:
    for name, result in results.items():
        if not result.first_tokens:
            raise BenchFailed(f"{attack}, {name}: no request was answered: {dict(result.errors)}")
        figure = {
            "p50_ttft_ms": percentile(result.first_tokens, 50) * 1000,
            "p99_ttft_ms": percentile(result.first_tokens, 99) * 1000,
            "requests": len(result.first_tokens),
            "errors": result.errors.total(),
            "attacks": result.attacks.total(),
        }
        report.cases.append(Case(f"{attack}: {name}", asdict(shape) | {"attacks": attack}, figure))
        report.notes.append(f"{attack}, {name}: responses to the attacker: {dict(result.attacks)}")
        report.notes += [f"{attack}, {name}: {count} x {error}" for error, count in result.errors.items()]
    p99 = {name: percentile(result.first_tokens, 99) for name, result in results.items()}
    report.ratios += [
        Ratio(
            f"{attack}: p99 TTFT, {ATTACKED} / {CONTROL}",
            p99[ATTACKED] / p99[CONTROL],
            REQUIRED_RATIO,
            "at most",
        ),
        Ratio(
            f"{attack}: errors of the other tenant", float(results[ATTACKED].errors.total()), 0.0, "at most"
        ),
    ]
