"""The checks of a release: KV type, tokens and template, golden answers, conformance, load shapes, memory plan.

Invariant: every check runs, whatever another finds, on the models that both sides serve; what cannot be measured fails.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Final

import httpx

from loraplex.engine.errors import EngineError
from loraplex.platform.bench.client import Completion, CompletionRequest
from loraplex.platform.bench.latency_metrics import latencies, percentile
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.mixes import MIXES, Mix
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.errors import GatewayError
from loraplex.platform.evaluations.answers import grade, validate_here
from loraplex.platform.evaluations.conformance import conformance_suite
from loraplex.platform.evaluations.runner import asking
from loraplex.platform.evaluations.suite import Case, Suite, read_suite
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.release_check.corpus import CONVERSATIONS, GOLDEN, PROMPTS
from loraplex.platform.release_check.releases import BASE, Release, ReleaseSpec, open_release
from loraplex.platform.startup_errors import StartError

ANSWER_TOKENS: Final = 24
AT_ONCE: Final = 8
ROUNDS: Final = 9
ROUND_REQUESTS: Final = 2
"""All at once. Both sides of a short round meet the same machine."""
SCALE: Final = 1 / 8
"""Lengths of the load shapes over those of `MIXES`."""

LOADING: Final = ("dtype", "device", "quantization")
"""Settings that a KV type is measured with."""
TOKENIZATION: Final = "tokenization"
VOCABULARIES_DIFFER: Final = "the vocabularies differ"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that NEW may differ from OLD.

    `differing`: mean share of a golden answer from its first other token on. `logprob`: mean difference of the likeliest tokens,
    in nats. `conformance`: share of cases that fail in addition. `slowdown`: ratio of medians. `memory`: share that is lost.
    """

    differing: float = 0.3
    logprob: float = 0.1
    conformance: float = 0.05
    slowdown: float = 1.3
    memory: float = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `value` None: nothing to compare, for the reason in `detail`."""

    name: str
    value: float | None
    bound: float
    detail: str = ""

    @property
    def outcome(self) -> str:
        """`pass`, `FAIL` or `skip`. NaN fails."""
        return "skip" if self.value is None else "pass" if self.value <= self.bound else "FAIL"

    @property
    def line(self) -> str:
        figure = "" if self.value is None else f" {self.value:.3g} (at most {self.bound:g})"
        return f"{self.outcome} {self.name}:{figure} {self.detail}".rstrip()


Measure = Callable[[], Awaitable[list[Check]]]


@dataclass(frozen=True, slots=True)
class Pair:
    """OLD and NEW. `models`: the names of both by what each is. `quick`: conformance of the base model alone, half the lengths."""

    old: Release
    new: Release
    bounds: Bounds = field(default_factory=Bounds)
    quick: bool = False

    @property
    def models(self) -> dict[str, tuple[str, str]]:
        return {
            each: (name, self.new.models[each])
            for each, name in self.old.models.items()
            if each in self.new.models
        }


async def run_checks(old: ReleaseSpec, new: ReleaseSpec, bounds: Bounds, quick: bool) -> AsyncIterator[Check]:
    """Serve both sides, and yield the result of each check as it ends. Raises `StartError`, `EngineError`."""
    kv = new.settings.get("kv_cache_dtype", "auto")
    if kv not in ("auto", old.settings.get("kv_cache_dtype")) and new.key_file is None:
        # Before the servers, whose models would leave no memory for a third one.
        for check in await _measured(f"kv {kv}", partial(asyncio.to_thread, kv_check, new, kv)):
            yield check
    async with open_release(old) as one, open_release(new) as other:
        differ = False
        for name, measure in _steps(Pair(one, other, bounds, quick)):
            if differ and name.startswith("answers"):
                yield Check(name, None, 0, VOCABULARIES_DIFFER)
                continue
            for check in await _measured(name, measure):
                differ = differ or check.name == TOKENIZATION and _has_other_vocabulary(check)
                yield check


async def _measured(name: str, measure: Measure) -> list[Check]:
    try:
        return await measure()
    except (StartError, EngineError, GatewayError, httpx.HTTPError) as error:
        return [Check(name, math.inf, 0, str(error) or type(error).__name__)]


def _steps(pair: Pair) -> list[tuple[str, Measure]]:
    suite = read_suite(conformance_suite())
    scale = SCALE / 2 if pair.quick else SCALE
    return [
        ("adapters", partial(_adapters, pair)),
        (TOKENIZATION, partial(_tokenization, pair)),
        ("template", partial(_template, pair)),
        *((f"answers {model}", partial(_answers, pair, model)) for model in pair.models),
        *(
            (f"conformance {model}", partial(_conformance, pair, model, suite))
            for model in pair.models
            if model == BASE or not pair.quick
        ),
        *((f"load {name}", partial(_load, pair, name, mix.scaled(scale))) for name, mix in MIXES.items()),
        ("memory plan", partial(memory_check, pair)),
    ]


def kv_check(spec: ReleaseSpec, kv: str) -> list[Check]:
    """The quality gate of a KV type, with the quantization that is served. Raises `ModelError`, `StartError`."""
    # Imported here: `--help` needs no torch.
    from loraplex.engine.offline_quantization.kv_gate import KV_BOUNDS, check_kv

    given = {name: spec.settings[name] for name in LOADING if name in spec.settings}
    with shown_progress() as progress:
        measured = check_kv(spec.model, kv, None, progress, **given)
    figures = "; ".join(
        f"{where}: perplexity {each.perplexity_ratio:.3f} x, top-1 {each.top1_agreement:.3f}, KL {each.kl:.4f}"
        for where, each in (("all", measured.whole), ("late positions", measured.late))
    )
    return [Check(f"kv {kv}", len(measured.violations(KV_BOUNDS)), 0, f"figures out of bounds; {figures}")]


async def _adapters(pair: Pair) -> list[Check]:
    lost = {
        each: pair.new.refused.get(each, "absent") for each in pair.old.models if each not in pair.new.models
    }
    detail = "; ".join(f"{each}: {reason}" for each, reason in lost.items())
    return [Check("adapters", len(lost), 0, detail or f"{len(pair.models) - 1} adapters on both sides")]


async def _tokenization(pair: Pair) -> list[Check]:
    batches = [list(PROMPTS[start : start + AT_ONCE]) for start in range(0, len(PROMPTS), AT_ONCE)]
    found = [
        (f"{model}: {prompt!r}", old, new)
        for batch in batches
        for model, (one, other) in await _encoded(pair, {"prompt": batch}, required=True)
        for prompt, old, new in zip(batch, one, other, strict=True)
    ]
    check = _equal(TOKENIZATION, found)
    return [
        replace(check, detail=f"{VOCABULARIES_DIFFER}; {check.detail}")
        if _has_other_vocabulary(check)
        else check
    ]


def _has_other_vocabulary(tokenization: Check) -> bool:
    """Whether so many prompts differ that the vocabularies do."""
    return tokenization.value is not None and tokenization.value > 0.5


async def _template(pair: Pair) -> list[Check]:
    found = [
        (f"{model}, conversation {number}", *sides)
        for number, body in enumerate(CONVERSATIONS, 1)
        for model, sides in await _encoded(pair, body, required=False)
    ]
    return [_equal("template", found)]


def _equal(name: str, found: Sequence[tuple[str, Any, Any]]) -> Check:
    wrong = [what for what, old, new in found if old != new]
    first = f", first {wrong[0][:80]}" if wrong else ""
    return Check(name, len(wrong) / len(found), 0, f"{len(wrong)} of {len(found)} differ{first}")


async def _encoded(
    pair: Pair, body: Mapping[str, Any], *, required: bool
) -> list[tuple[str, tuple[Any, Any]]]:
    """What `/v1/tokenize` of both sides says for each model: tokens, or unless they are `required` the code of an error."""

    async def ask(client: httpx.AsyncClient, model: str) -> Any:
        response = await client.post("tokenize", json={**body, "model": model})
        if required and response.status_code != httpx.codes.OK:
            raise BenchFailed(f"POST /v1/tokenize: HTTP {response.status_code}: {response.text[:500]}")
        document = response.json()
        return document["error"]["code"] if "error" in document else document["tokens"]

    async with pair.old.client() as old, pair.new.client() as new:
        return [
            (model, (await ask(old, one), await ask(new, other)))
            for model, (one, other) in pair.models.items()
        ]


async def _answers(pair: Pair, model: str) -> list[Check]:
    """How far greedy answers agree, and how much the likeliest tokens' log-probabilities differ where the texts are equal."""
    sides = []
    for release in (pair.old, pair.new):
        options = {"logprobs": 5}
        asked = [
            CompletionRequest(release.models[model], text, ANSWER_TOKENS, release.api_key, options=options)
            for text in GOLDEN
        ]
        sides.append((await run_load(release.base_url, asked, AT_ONCE)).require_complete().completions)
    pairs = [compared(old, new) for old, new in zip(*sides, strict=True)]
    differing, gaps = fmean(share for share, _ in pairs), [gap for _, each in pairs for gap in each]
    return [
        Check(f"answers {model}", differing, pair.bounds.differing, "of golden answers differ"),
        Check(f"log-probabilities {model}", fmean(gaps), pair.bounds.logprob, "nats apart"),
    ]


def compared(old: Completion, new: Completion) -> tuple[float, list[float]]:
    """The share of an answer from its first other token on, and the differences up to that token. Raises `BenchFailed`."""
    if not old.tokens:
        raise BenchFailed("the server sent no log-probabilities")
    equal = next((at for at, (a, b) in enumerate(zip(old.tokens, new.tokens)) if a != b), len(old.tokens))
    tops = zip(old.tops[: equal + 1], new.tops[: equal + 1])
    gaps = [abs(one[token] - other[token]) for one, other in tops for token in one if token in other]
    return 1 - equal / len(old.tokens), gaps or [math.inf]


async def _conformance(pair: Pair, model: str, suite: Suite) -> list[Check]:
    """The share of cases that NEW fails more than OLD. Several run at once: only what passes is compared."""

    async def passed(release: Release, name: str) -> int:
        slots = asyncio.Semaphore(AT_ONCE)
        async with release.client() as client:

            async def one(case: Case) -> bool:
                async with slots:
                    reply = await asking(client)(case.body(name, 0, "release-check"))
                return not (await grade(case, reply, validate_here)).failed

            return sum(await asyncio.gather(*map(one, suite.cases)))

    old, new = [await passed(each, each.models[model]) for each in (pair.old, pair.new)]
    total = len(suite.cases)
    detail = f"of cases fail in addition: {new} of {total} pass, OLD {old}"
    return [Check(f"conformance {model}", max(old - new, 0) / total, pair.bounds.conformance, detail)]


async def _load(pair: Pair, name: str, mix: Mix) -> list[Check]:
    """The largest slowdown of TTFT, TPOT and quick steps; out of bounds, it has to stay so over twice the rounds.

    TTFT and TPOT: the median over rounds of the ratio of medians, as a busy machine slows both sides of a round. Quick steps:
    the ratio of the 10th percentiles of all gaps, to which others on the machine add least.
    """
    ratios: dict[str, list[float]] = {"ttft": [], "tpot": []}
    gaps: tuple[list[float], list[float]] = ([], [])
    found: dict[str, float] = {}
    for number in range(-1, 2 * ROUNDS):
        if number == ROUNDS and max(found.values(), default=math.inf) <= pair.bounds.slowdown:
            break
        old, new = sides = [latencies(await _round(pair, side, mix, number)) for side in (0, 1)]
        if number < 0:
            continue
        for metric, values in ratios.items():
            if old[metric] and new[metric]:
                values.append(median(new[metric]) / median(old[metric]))
        for kept, each in zip(gaps, sides, strict=True):
            # Tokens that arrive together have no gap.
            kept.extend(gap for gap in each["itl"] if gap > 0)
        found = {metric: median(values) for metric, values in ratios.items() if values}
        if all(gaps):
            found["step"] = percentile(gaps[1], 10) / percentile(gaps[0], 10)
    detail = ", ".join(f"{metric} {ratio:.2f} x" for metric, ratio in found.items())
    return [Check(f"load {name}", max(found.values(), default=math.inf), pair.bounds.slowdown, detail)]


async def _round(pair: Pair, side: int, mix: Mix, number: int) -> Sequence[Completion]:
    """A few requests to one side, of the models in turn."""
    release, models = (pair.old, pair.new)[side], [names[side] for names in pair.models.values()]
    requests = []
    for index in range((number + 1) * ROUND_REQUESTS, (number + 2) * ROUND_REQUESTS):
        text, length = mix.draw(0, index, index % len(models))
        model, options = models[index % len(models)], mix.options(index)
        requests.append(CompletionRequest(model, text, length, release.api_key, options=options, chat=True))
    found = (await run_load(release.base_url, requests)).completions
    if wrong := next((each.error for each in found if not each.complete), None):
        raise BenchFailed(f"a request was not answered: {wrong}")
    return found


async def memory_check(pair: Pair) -> list[Check]:
    """The largest share of context, rows, cached tokens or resident adapters that NEW has less."""
    old, new = pair.old.plan, pair.new.plan
    if old is None or new is None:
        return [
            Check("memory plan", None, pair.bounds.memory, "a server that runs already has none to compare")
        ]
    figures = {name: (old[name], new[name]) for name in ("max_model_len", "rows", "kv_tokens")}
    figures["adapters"] = old["adapters"][0]["resident"], new["adapters"][0]["resident"]
    lost = max(1 - after / before if before else 0.0 for before, after in figures.values())
    sizes = [f"{name} {before:,} -> {after:,}" for name, (before, after) in figures.items()]
    weights = f"weights {old['weights_bytes'] / 1e6:,.0f} -> {new['weights_bytes'] / 1e6:,.0f} MB"
    return [Check("memory plan", max(lost, 0.0), pair.bounds.memory, ", ".join((*sizes, weights)))]
