"""`bench grammar`: output rate of rows with a grammar against rows without one that have the same lengths.

Invariant: both sides of a ratio run alternately on one server with equal numbers of rows, prompt tokens and output tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.fixtures import open_fixtures, token_pool
from loraplex.platform.bench.load import LoadResult, run_load
from loraplex.platform.bench.local_server import BASE_MODEL, run_local_server
from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.bench.workload import draw_prompts
from loraplex.platform.processes.progress import Progress

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
class StructuredOutputShape:
    """`rows` at once, at most `max_tokens` each; `repeats` counted rounds of both sides."""

    rows: int = 16
    input_len: int = 60
    max_tokens: int = 128
    repeats: int = 5
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Round:
    """The same rows with a grammar and without."""

    constrained: LoadResult
    unconstrained: LoadResult

    @property
    def ratio(self) -> float:
        return self.constrained.output_rate / self.unconstrained.output_rate


async def measure_structured_output(
    model: str, shape: StructuredOutputShape, settings: Mapping[str, str], progress: Progress
) -> Report:
    """Raises `BenchFailed`."""
    report = Report("grammar-rate", COLUMNS)
    for fast_forward, name in FAST_FORWARD.items():
        own = {"dtype": shape.dtype, "grammar_fast_forward": str(fast_forward).lower(), **settings}
        progress("starting the server")
        async with run_local_server(model, own) as server:
            async with open_fixtures(server) as fixtures:
                api_key = (await fixtures.tenant("bench")).api_key
            pool = await token_pool(server.base_url, api_key, BASE_MODEL)
            for kind in (JSON_SCHEMAS, TOOL_CALLS):
                progress(f"{kind}, {name}")
                requests = _constrained_requests(kind, shape, pool, api_key)
                rounds = []
                for index in range(shape.repeats + 1):  # the first one warms up
                    rounds.append(await _round(server.base_url, requests, pool))
                    progress(f"{kind}, {name}", (index + 1) / (shape.repeats + 1))
                _add_case(report, shape, (kind, fast_forward), rounds[1:])
    report.notes.append(
        "The free rows are forced to the number of tokens their held twins had in the same round."
    )
    return report


def _constrained_requests(
    kind: str, shape: StructuredOutputShape, pool: Sequence[int], api_key: str
) -> list[CompletionRequest]:
    """Greedy rows with distinct prompts: two schemas alternately, or a list of tools of which the model must call one."""
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
    constrained = await run_load(base_url, requests)
    for completion in constrained.completions:
        if not completion.complete or not completion.output_tokens:
            raise BenchFailed(f"a row with a grammar was not answered: {completion.error or 'no token'}")
    unconstrained = [
        CompletionRequest(
            BASE_MODEL,
            draw_prompts(pool, 1, completion.prompt_tokens, seed=2 + index)[0]
            if request.chat
            else request.prompt,
            completion.output_tokens,
            request.api_key,
        )
        for index, (request, completion) in enumerate(zip(requests, constrained.completions, strict=True))
    ]
    return Round(constrained, (await run_load(base_url, unconstrained)).require_complete())


def _add_case(
    report: Report, shape: StructuredOutputShape, what: tuple[str, bool], rounds: Sequence[Round]
) -> None:
    kind, fast_forward = what
    name = f"{kind}, {FAST_FORWARD[fast_forward]}"
    completions = [completion for each in rounds for completion in each.constrained.completions]
    ratio = median(each.ratio for each in rounds)
    figure = {
        "held_tokens_per_s": median(each.constrained.output_rate for each in rounds),
        "free_tokens_per_s": median(each.unconstrained.output_rate for each in rounds),
        "ratio": ratio,
        "ratios": [round(each.ratio, 3) for each in rounds],
        "completion_tokens": sum(completion.output_tokens for completion in completions) // len(rounds),
        "ended_by_themselves": sum(completion.finish_reason != "length" for completion in completions)
        / len(completions),
    }
    report.cases.append(Case(name, asdict(shape), figure))
    report.ratios.append(Ratio(f"tokens/s with and without a grammar: {name}", ratio, REQUIRED.get(what)))
