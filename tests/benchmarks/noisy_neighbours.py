"""Inter-token latency of plain rows while another tenant sends hostile grammars, against undisturbed rows.

Invariant: no two hostile requests have the same bytes, so that no cache of compile results takes the load off.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import count, cycle
from typing import Any

from loraplex.platform.bench.client import Completion, CompletionRequest, decode, stream_completion
from loraplex.platform.bench.fixtures import open_fixtures, token_pool
from loraplex.platform.bench.latency_metrics import inter_token_latencies, percentile
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts

Schema = dict[str, Any]
UNDISTURBED, ATTACKED = "undisturbed", "beside hostile grammars"
REQUIRED_RATIO = 2.0
COLUMNS = (
    "p50_itl_ms",
    "p99_itl_ms",
    "max_itl_ms",
    "gaps",
    "hostile_answered",
    "hostile_refused",
    "slowest_hostile_s",
)
SERVER_FAULTS = tuple(f"HTTP {status}" for status in (500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class NoisyNeighboursShape:
    """`rows` plain rows stream while `attackers` connections of another tenant send one hostile grammar after another."""

    rows: int = 8
    input_len: int = 60
    output_len: int = 256
    attackers: int = 4
    hostile_tokens: int = 16
    repeats: int = 3
    dtype: str = "bfloat16"


@dataclass(slots=True)
class AttackResult:
    """Outcomes of the hostile requests by schema name, and the seconds of each request."""

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


async def measure_noisy_neighbours(
    model: str, shape: NoisyNeighboursShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`, also if a plain row does not get all its tokens."""
    report = Report("grammar-neighbours", COLUMNS)
    gaps: dict[str, list[float]] = {UNDISTURBED: [], ATTACKED: []}
    attack, schemas = AttackResult(), endless_hostile_schemas()
    async with run_local_server(model, {"dtype": shape.dtype, **settings}) as server:
        async with open_fixtures(server) as fixtures:
            victim, attacker = await fixtures.tenant("victim"), await fixtures.tenant("attacker")
        pool = await token_pool(server.base_url, victim.api_key, BASE_MODEL)
        seeds = count()
        for repeat in range(shape.repeats + 1):  # the first round warms up
            for name in gaps:
                progress(f"round {repeat} of {shape.repeats}: {name}")
                rows = asyncio.create_task(_rows(server.base_url, shape, pool, victim.api_key, next(seeds)))
                if name == ATTACKED:
                    await _attack(server.base_url, shape, attacker.api_key, schemas, attack, rows)
                found = await rows
                gaps[name] += found if repeat else []
    _summarize(report, shape, gaps, attack)
    return report


async def _rows(
    base_url: str, shape: NoisyNeighboursShape, pool: Sequence[int], api_key: str, seed: int
) -> list[float]:
    """Gaps between tokens of plain rows, in seconds."""
    prompts = draw_prompts(pool, shape.rows, shape.input_len, seed)
    requests = [CompletionRequest(BASE_MODEL, prompt, shape.output_len, api_key) for prompt in prompts]
    result = (await run_load(base_url, requests)).require_complete()
    return [gap for completion in result.completions for gap in inter_token_latencies(completion)]


async def _attack(
    base_url: str,
    shape: NoisyNeighboursShape,
    api_key: str,
    schemas: Iterator[tuple[str, Schema]],
    attack: AttackResult,
    rows: "asyncio.Task[list[float]]",
) -> None:
    async def one_after_another() -> None:
        while not rows.done():
            name, schema = next(schemas)
            options = {"structured_outputs": {"json": schema}, "ignore_eos": False}
            request = CompletionRequest(BASE_MODEL, "Answer:", shape.hostile_tokens, api_key, options=options)
            _note(attack, name, decode(await stream_completion(base_url, request)))

    attackers = [asyncio.create_task(one_after_another()) for _ in range(shape.attackers)]
    try:
        await rows
    finally:
        # Cancel attackers that still wait for a grammar: only requests during the plain rows count.
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)


def _note(attack: AttackResult, name: str, completion: Completion) -> None:
    attack.seconds.append(completion.latency)
    if completion.complete:
        attack.answered[name] += 1
    elif completion.error is not None and completion.error.startswith(SERVER_FAULTS):
        attack.faults[name] = completion.error
    else:
        attack.refused[name] += 1


def _summarize(
    report: Report, shape: NoisyNeighboursShape, gaps: Mapping[str, Sequence[float]], attack: AttackResult
) -> None:
    if not attack.seconds:
        raise BenchFailed("no hostile request was sent while the rows ran: raise --output-len")
    p99 = {}
    for name, found in gaps.items():
        p99[name] = percentile(found, 99)
        figure = {
            "p50_itl_ms": percentile(found, 50) * 1000,
            "p99_itl_ms": p99[name] * 1000,
            "max_itl_ms": max(found) * 1000,
            "gaps": len(found),
        }
        if name == ATTACKED:
            figure |= {
                "hostile_answered": attack.answered.total(),
                "hostile_refused": attack.refused.total(),
                "slowest_hostile_s": max(attack.seconds),
            }
        report.cases.append(Case(name, asdict(shape), figure))
    report.ratios += [
        Ratio(
            f"p99 inter-token latency: {ATTACKED} / {UNDISTURBED}",
            p99[ATTACKED] / p99[UNDISTURBED],
            REQUIRED_RATIO,
            "at most",
        ),
        Ratio("hostile grammars that ended in a server fault", float(len(attack.faults)), 0.0, "at most"),
    ]
    report.notes += [f"{name}: {error}" for name, error in attack.faults.items()]
    report.notes.append(f"answered: {', '.join(sorted(attack.answered)) or 'none'}")
    report.notes.append(f"refused: {', '.join(sorted(attack.refused)) or 'none'}")


def _nested(depth: int, wrap: str) -> Schema:
    def around(inner: Schema, _: int) -> Schema:
        return {"type": "array", "items": inner} if wrap == "items" else {wrap: [inner, {"type": "null"}]}

    return reduce(around, range(depth), {"type": "integer"})


def _one_of_pairs(depth: int) -> Schema:
    """Two alternatives per level that differ only in their innermost part."""

    def level(inner: Schema, number: int) -> Schema:
        alternative = {"type": "object", "properties": {f"p{number}": inner}, "additionalProperties": False}
        return {"oneOf": [alternative, {**alternative, "required": [f"p{number}"]}]}

    return reduce(level, range(depth), {"type": "integer"})


def hostile_schemas() -> dict[str, Schema]:
    """Hostile schemas by name: a bound rejects some, the compile check others, and some compile at a cost."""
    text: Schema = {"type": "string"}
    return {
        "40 levels of anyOf": _nested(40, "anyOf"),
        "12 levels of oneOf": _one_of_pairs(12),
        "500 nested arrays": _nested(500, "items"),
        "enum of 10,000": {"enum": [f"value number {number}" for number in range(10_000)]},
        "enum of 40,000": {"enum": [f"value number {number}" for number in range(40_000)]},
        "reference to itself": {"$ref": "#"},
        "endless required recursion": {
            "type": "object",
            "properties": {"next": {"$ref": "#"}},
            "required": ["next"],
        },
        "maxLength 2,000": {"type": "object", "properties": {"a": {**text, "maxLength": 2000}}},
        "200 strings of maxLength 40": {
            "type": "object",
            "properties": {f"p{number}": {**text, "maxLength": 40} for number in range(200)},
        },
        "repeated repetition": {**text, "pattern": "^((a{1,500}b){1,500}c){1,500}$"},
        "look-ahead": {**text, "pattern": "^(?=.*a)(?=.*b).{8,}$"},
        "wide character classes": {**text, "pattern": r"^(\w|\d|[^\s]){0,3000}\p{L}{0,3000}$"},
        "megabyte of properties": {
            "type": "object",
            "properties": {f"property_{number:06}": text for number in range(30_000)},
        },
        "2,000 optional properties": {
            "type": "object",
            "properties": {f"p{number}": text for number in range(2_000)},
        },
        "items 100 to 5,000": {"type": "array", "items": text, "minItems": 100, "maxItems": 5000},
    }


def endless_hostile_schemas() -> Iterator[tuple[str, Schema]]:
    """Repeat the schemas endlessly, each with a distinct comment."""
    schemas = hostile_schemas()
    for number, name in zip(count(), cycle(schemas), strict=False):
        yield name, {**schemas[name], "$comment": f"request {number}"}
