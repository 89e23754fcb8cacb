"""`/v1/decisions` on one server: many questions about one input beside one long prompt, many adapters over one conversation, and
streaming rows beside many questions.

Every round has an input of its own, so that nothing of it is in a cache but what the case says. The sides of a ratio take turns.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any, Final, TypeAlias

import httpx
from tests.benchmarks.scoring import gaps_beside, start_rows

from loraplex.platform.bench.client import CompletionRequest, StreamRecord
from loraplex.platform.bench.fixtures import adapter_name, open_fixtures
from loraplex.platform.bench.latency_metrics import percentile
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.inference.decisions.pipeline import MAX_ROWS
from loraplex.platform.inference.decisions.wording import question_text
from loraplex.platform.parameters.decision_request import ChoiceQuestion, PredicateQuestion

COLUMNS: Final = ("p50_s", "p95_s", "input_tokens", "cached_tokens", "p99_itl_ms")
WORDS: Final = [
    "order",
    "refund",
    "late",
    "parcel",
    "invoice",
    "screen",
    "login",
    "error",
    "pump",
    "valve",
    "price",
    "team",
    "report",
    "page",
    "mail",
    "card",
]
SETTINGS: Final[Mapping[str, str]] = {"queue_timeout_s": "600", "kv_cache_bytes": str(4 << 30)}
"""Rows of many adapters wait for cold prompts of the others; the conversation of each, and another one, have room."""
ALONE_S: Final = 8.0
"""How long the gaps of rows alone are counted."""
LEAD: Final = 10
"""Pieces of text that each row has before the questions come."""
CHOICES: Final = ["billing", "technical", "other"]
TEAM: Final = {
    "type": "choice",
    "instructions": "Which team is this for?",
    "choices": [{"value": each} for each in CHOICES],
}
Message: TypeAlias = Mapping[str, str]
Usage: TypeAlias = Mapping[str, int]
Works: TypeAlias = Mapping[str, Callable[[], Awaitable[Usage]]]


@dataclass(frozen=True, slots=True)
class DecisionsShape:
    """`questions` about an input of some `input_words`; `adapters` over a conversation of `conversation_words`, of which the last
    message has `new_words`; `rows` stream `output_len` tokens beside `beside` questions. Each side has `repeats` rounds, or
    `long_repeats` or `cold_repeats` where they take long, and most have one before them that does not count.
    """

    questions: int = 60
    input_words: int = 720
    adapters: int = 20
    conversation_words: int = 1920
    new_words: int = 72
    rank: int = 8
    rows: int = 8
    beside: int = 200
    output_len: int = 768
    repeats: int = 5
    long_repeats: int = 3
    cold_repeats: int = 2
    dtype: str = "bfloat16"


class Side:
    """The rounds of one side: what they took, the p99 of the gaps between tokens of rows beside each, and the usage of the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.p99_itl_s: list[float] = []
        self.usage: Usage = {}

    def figures(self) -> dict[str, float]:
        """Return `COLUMNS`."""
        return {
            "p50_s": median(self.seconds),
            "p95_s": percentile(self.seconds, 95),
            "input_tokens": self.usage.get("input", 0),
            "cached_tokens": self.usage.get("cached", 0),
            "p99_itl_ms": median(self.p99_itl_s or [0.0]) * 1000,
        }


class Asker:
    """Asks one server as one tenant. Texts are drawn from `random`."""

    def __init__(self, client: httpx.AsyncClient, random: Random, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self._client = client
        self._random = random

    def text(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))

    async def decide(self, model: str, given: object, questions: Sequence[Mapping[str, Any]]) -> Usage:
        answer = await self._post("decisions", {"model": model, "input": given, "questions": questions})
        usage = answer["usage"]
        return {"input": usage["input_tokens"], "cached": usage["input_tokens_details"]["cached_tokens"]}

    async def chat(self, model: str, messages: object, **options: Any) -> Usage:
        answer = await self._post(
            "chat/completions", {"model": model, "messages": messages, "temperature": 0, **options}
        )
        usage = answer["usage"]
        return {"input": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}

    async def say(self, model: str, text: str) -> Usage:
        """Compute a prompt, and one token behind it."""
        return await self.chat(model, [{"role": "user", "content": text}], max_tokens=1)

    async def _post(self, path: str, body: object) -> Any:
        response = await self._client.post(path, json=body)
        if response.status_code != httpx.codes.OK:
            raise BenchFailed(f"{path}: HTTP {response.status_code}: {response.text[:500]}")
        return response.json()


async def measure_decisions(
    model: str, shape: DecisionsShape, settings: Mapping[str, str], progress: Callable[[str], None]
) -> Report:
    """Measure all sides. Raises `BenchFailed`."""
    report = Report("decisions", COLUMNS)
    sides: defaultdict[str, Side] = defaultdict(Side)
    async with _open(model, shape, settings) as asker:
        for number in range(shape.repeats + 1):
            progress(f"round {number}" if number else "warm-up")
            turn = 1 if number % 2 else -1
            await _questions_round(asker, shape, sides, turn)
            if number <= shape.long_repeats:
                await _rows_round(asker, shape, sides, turn)
            if not number:
                sides.clear()
            if number < shape.cold_repeats:
                said = await _cold_round(asker, shape, sides)
            await _warm_round(asker, shape, sides, said, turn)
    report.cases += [Case(name, asdict(shape), side.figures()) for name, side in sides.items()]
    report.ratios += compare({name: side.figures() for name, side in sides.items()})
    return report


def compare(figures: Mapping[str, Mapping[str, float]]) -> list[Ratio]:
    """Return the ratios of medians."""
    p50 = {name: each["p50_s"] for name, each in figures.items()}
    p95 = {name: each["p95_s"] for name, each in figures.items()}
    p99 = {name: each["p99_itl_ms"] for name, each in figures.items()}
    many, one = "adapters, warm", "one adapter, warm"
    return [
        Ratio(
            "questions / one prompt with all of them", p50["questions"] / p50["one prompt"], 1.4, "at most"
        ),
        *(
            Ratio(f"{name}: adapters / one adapter, warm", times[many] / times[one], 3.0, "at most")
            for name, times in (("p50", p50), ("p95", p95))
        ),
        Ratio("chats with `choice` / adapters, warm", p50["chats, warm"] / p50[many], 3.0, "at least"),
        Ratio(
            "adapters / their prompts alone, cold",
            p50["adapters, cold"] / p50["prompts, cold"],
            1.3,
            "at most",
        ),
        *(
            Ratio(f"p99 gap: {beside} / {than}", p99[beside] / p99[than], 1.25, "at most")
            for beside in ["rows, questions"]
            for than in ("rows, alone", "rows, prompts")
        ),
        Ratio("adapters / one question, warm", p50[many] / p50["one question, warm"], 3.0, "at most"),
    ]


@asynccontextmanager
async def _open(model: str, shape: DecisionsShape, settings: Mapping[str, str]) -> AsyncIterator[Asker]:
    async with run_local_server(model, {**SETTINGS, "dtype": shape.dtype, **settings}) as server:
        async with open_fixtures(server) as fixtures:
            tenant = await fixtures.tenant("bench")
            await fixtures.push_random(tenant, [shape.rank] * shape.adapters)
        headers = {"authorization": f"Bearer {tenant.api_key}"}
        async with httpx.AsyncClient(
            base_url=f"{server.base_url}/v1/", headers=headers, timeout=600
        ) as client:
            yield Asker(client, Random(0), server.base_url, tenant.api_key)


async def _timed(side: Side, work: Awaitable[Usage]) -> None:
    began = time.perf_counter()
    side.usage = await work
    side.seconds.append(time.perf_counter() - began)


async def _in_turn(sides: Mapping[str, Side], works: Works, turn: int) -> None:
    """Measure each side, from the last one where `turn` is -1."""
    for name in [*works][::turn]:
        await _timed(sides[name], works[name]())


async def _questions_round(asker: Asker, shape: DecisionsShape, sides: Mapping[str, Side], turn: int) -> None:
    texts = [f"Is number {number} of the list a {asker.text(2)}?" for number in range(shape.questions)]
    questions = [{"type": "predicate", "instructions": text} for text in texts]
    # The same tokens in one row: each question with what the server writes around it.
    asked = "\n\n".join(
        question_text(PredicateQuestion.check(question), labels=True) for question in questions
    )
    works = {
        "questions": lambda: asker.decide(BASE_MODEL, asker.text(shape.input_words), questions),
        "one prompt": lambda: asker.say(BASE_MODEL, f"{asker.text(shape.input_words)}\n\n{asked}"),
    }
    await _in_turn(sides, works, turn)


async def _cold_round(asker: Asker, shape: DecisionsShape, sides: Mapping[str, Side]) -> Sequence[Message]:
    """Return a conversation that the cache of each adapter has: the last that was computed, since others may take its blocks."""
    names, said, other = _names(shape), _conversation(asker, shape), _conversation(asker, shape)
    questions = [TEAM | {"model": name} for name in names]
    await _timed(sides["prompts, cold"], _chats(asker, names, other, max_tokens=1))
    await _timed(sides["adapters, cold"], asker.decide(names[0], said, questions))
    return said


async def _warm_round(
    asker: Asker, shape: DecisionsShape, sides: Mapping[str, Side], said: Sequence[Message], turn: int
) -> None:
    """As many questions, each with a text of its own: one of each adapter, or all of one. The chats are asked the same."""
    names = _names(shape)
    texts = [f"Which team is number {number} for?" for number in range(shape.adapters)]
    of_one = [TEAM | {"instructions": text} for text in texts]
    of_all = [question | {"model": name} for question, name in zip(of_one, names, strict=True)]

    def given(question: str = "") -> Sequence[Message]:
        new = {"role": "user", "content": asker.text(shape.new_words) + question}
        return [*said, {"role": "assistant", "content": "I see."}, new]

    chat = f"\n\n{question_text(ChoiceQuestion.check(of_one[0]), labels=False)}"
    works = {
        "adapters, warm": lambda: asker.decide(names[0], given(), of_all),
        "one adapter, warm": lambda: asker.decide(names[0], given(), of_one),
        "one question, warm": lambda: asker.decide(names[0], given(), of_one[:1]),
        "chats, warm": lambda: _chats(asker, names, given(chat), structured_outputs={"choice": CHOICES}),
    }
    await _in_turn(sides, works, turn)


async def _rows_round(asker: Asker, shape: DecisionsShape, sides: Mapping[str, Side], turn: int) -> None:
    """The gaps of rows beside questions, beside as many prompts of their length, and alone."""
    instructions = [f"Is it a {asker.text(3)}?" for _ in range(shape.beside)]
    questions = [{"type": "predicate", "instructions": each} for each in instructions]
    works: Works = {
        "rows, questions": lambda: asker.decide(BASE_MODEL, asker.text(shape.new_words), questions),
        "rows, prompts": lambda: _prompts(asker, [PredicateQuestion.check(each) for each in questions]),
        "rows, alone": lambda: asyncio.sleep(ALONE_S, {}),
    }
    for name in [*works][::turn]:
        await _beside(asker, shape, sides[name], works[name]())


async def _beside(asker: Asker, shape: DecisionsShape, side: Side, work: Awaitable[Usage]) -> None:
    rows = [
        StreamRecord(CompletionRequest(BASE_MODEL, asker.text(24), shape.output_len, asker.api_key))
        for _ in range(shape.rows)
    ]
    running = await start_rows(asker.base_url, rows, LEAD)
    began = time.perf_counter()
    await _timed(side, work)
    ended = time.perf_counter()
    await asyncio.gather(*running)
    side.p99_itl_s.append(percentile(gaps_beside(rows, began, ended).gaps, 99))


async def _prompts(asker: Asker, questions: Sequence[PredicateQuestion]) -> Usage:
    """Ask each question in a chat of its own, as many at once as a decision has rows in the engine."""
    places = asyncio.Semaphore(MAX_ROWS)

    async def ask(question: PredicateQuestion) -> None:
        async with places:
            await asker.say(BASE_MODEL, question_text(question, labels=True))

    await asyncio.gather(*map(ask, questions))
    return {}


def _names(shape: DecisionsShape) -> list[str]:
    return [adapter_name(number) for number in range(shape.adapters)]


def _conversation(asker: Asker, shape: DecisionsShape) -> Sequence[Message]:
    """One user's message, which no cache has."""
    return [{"role": "user", "content": asker.text(shape.conversation_words)}]


async def _chats(asker: Asker, names: Sequence[str], messages: object, **options: Any) -> Usage:
    """Ask each adapter in a chat of its own, all at once."""
    usages = await asyncio.gather(*(asker.chat(name, messages, **options) for name in names))
    return {key: sum(each[key] for each in usages) for key in ("input", "cached")}
