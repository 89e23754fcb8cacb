"""Output rate of rows held to a grammar against the same rows without one, forced to the same lengths.

Invariant: both sides of a ratio run in turn on one server, with as many rows, prompt tokens and output tokens each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import registration, token_pool
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, own_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts

COLUMNS = (
    "held_tokens_per_s",
    "free_tokens_per_s",
    "ratio",
    "ratios",
    "completion_tokens",
    "ended_by_themselves",
)
JSON_SCHEMAS: Final = "JSON schemas"
TOOL_CALLS: Final = "tool calls"
FAST_FORWARD: Final = {False: "fast-forward off", True: "fast-forward on"}
REQUIRED: Final = {(JSON_SCHEMAS, False): 0.95, (TOOL_CALLS, True): 1.0}
Schema = dict[str, Any]


def closed_object(**properties: Schema) -> Schema:
    """An object of exactly these fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT: Schema = {"type": "string"}
THREE_FIELDS = closed_object(name=TEXT, age={"type": "integer"}, city=TEXT)
TWELVE_FIELDS = closed_object(
    id={"type": "string", "format": "uuid"},
    name={"type": "string", "maxLength": 40},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    score={"type": "number"},
    active={"type": "boolean"},
    role={"enum": ["admin", "editor", "viewer", "guest"]},
    email={"type": "string", "format": "email"},
    joined={"type": "string", "format": "date"},
    tags={"type": "array", "items": TEXT, "maxItems": 5},
    address=closed_object(street=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    note={"anyOf": [TEXT, {"type": "null"}]},
    level={"enum": [1, 2, 3]},
)
TOOLS: dict[str, Schema] = {
    "get_weather": closed_object(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    "search_documents": closed_object(query=TEXT, limit={"type": "integer", "minimum": 1, "maximum": 50}),
    "send_message": closed_object(recipient=TEXT, subject=TEXT, urgent={"type": "boolean"}),
    "create_event": closed_object(title=TEXT, date={"type": "string", "format": "date"}, guests=TEXT),
    "convert_currency": closed_object(amount={"type": "number"}, source=TEXT, target=TEXT),
    "list_files": closed_object(folder=TEXT, recursive={"type": "boolean"}),
    "translate_text": closed_object(text=TEXT, language={"enum": ["de", "en", "fr", "es"]}),
    "set_reminder": closed_object(note=TEXT, minutes={"type": "integer", "minimum": 1, "maximum": 1440}),
}


def request_tools() -> list[dict[str, Any]]:
    """`TOOLS` as a chat request carries them."""
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in TOOLS.items()
    ]


@dataclass(frozen=True, slots=True)
class RateShape:
    """`rows` at once, at most `max_tokens` each; `repeats` counted rounds of both sides."""

    rows: int = 16
    input_len: int = 60
    max_tokens: int = 128
    repeats: int = 5
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Round:
    """The same rows held and free."""

    held: LoadResult
    free: LoadResult

    @property
    def ratio(self) -> float:
        return self.held.output_rate / self.free.output_rate


async def measure_rate(
    model: str, shape: RateShape, settings: Mapping[str, str], say: Callable[[str], None]
) -> Report:
    """Raises `BenchFailed`."""
    report = Report("grammar-rate", COLUMNS)
    for fast_forward, name in FAST_FORWARD.items():
        own = {"dtype": shape.dtype, "grammar_fast_forward": str(fast_forward).lower(), **settings}
        async with own_server(model, own) as server:
            async with registration(server) as accounts:
                api_key = (await accounts.tenant("bench")).api_key
            pool = await token_pool(server.base_url, api_key, BASE_MODEL)
            for kind in (JSON_SCHEMAS, TOOL_CALLS):
                say(f"{kind}, {name}")
                requests = _held(kind, shape, pool, api_key)
                rounds = [await _round(server.base_url, requests, pool) for _ in range(shape.repeats + 1)][1:]
                _add(report, shape, (kind, fast_forward), rounds)
    report.notes.append(
        "The free rows are forced to the number of tokens their held twins had in the same round."
    )
    return report


def _held(kind: str, shape: RateShape, pool: Sequence[int], api_key: str) -> list[CompletionRequest]:
    """Greedy rows, each with a prompt of its own; two schemas in turn, or one list of tools of which one is to be called."""
    requests = []
    for index, prompt in enumerate(draw_prompts(pool, shape.rows, shape.input_len, seed=1)):
        schema = (THREE_FIELDS, TWELVE_FIELDS)[index % 2]
        asked: dict[str, Any] = {"structured_outputs": {"json": schema}}
        if kind == TOOL_CALLS:
            asked = {"tools": request_tools(), "tool_choice": "required", "parallel_tool_calls": False}
        requests.append(
            CompletionRequest(
                BASE_MODEL,
                f"Question {index}: what should be done next?" if kind == TOOL_CALLS else prompt,
                shape.max_tokens,
                api_key,
                options={"ignore_eos": False, **asked},
                chat=kind == TOOL_CALLS,
            )
        )
    return requests


async def _round(base_url: str, requests: Sequence[CompletionRequest], pool: Sequence[int]) -> Round:
    held = await run_load(base_url, requests)
    for answer in held.answers:
        if not answer.complete or not answer.output_tokens:
            raise BenchFailed(f"a row with a grammar was not answered: {answer.error or 'no token'}")
    free = [
        CompletionRequest(
            BASE_MODEL,
            draw_prompts(pool, 1, answer.prompt_tokens, seed=2 + index)[0]
            if request.chat
            else request.prompt,
            answer.output_tokens,
            request.api_key,
        )
        for index, (request, answer) in enumerate(zip(requests, held.answers, strict=True))
    ]
    return Round(held, (await run_load(base_url, free)).require_complete())


def _add(report: Report, shape: RateShape, what: tuple[str, bool], rounds: Sequence[Round]) -> None:
    kind, fast_forward = what
    name = f"{kind}, {FAST_FORWARD[fast_forward]}"
    answers = [answer for each in rounds for answer in each.held.answers]
    ratio = median(each.ratio for each in rounds)
    figure = {
        "held_tokens_per_s": median(each.held.output_rate for each in rounds),
        "free_tokens_per_s": median(each.free.output_rate for each in rounds),
        "ratio": ratio,
        "ratios": [round(each.ratio, 3) for each in rounds],
        "completion_tokens": sum(answer.output_tokens for answer in answers) // len(rounds),
        "ended_by_themselves": sum(answer.finish_reason != "length" for answer in answers) / len(answers),
    }
    report.cases.append(Case(name, asdict(shape), figure))
    report.ratios.append(Ratio(f"tokens/s with and without a grammar: {name}", ratio, REQUIRED.get(what)))
