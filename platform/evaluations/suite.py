"""Suites: JSONL files of cases, each a chat request and what its answer has to be.

Invariant: a suite that was read has no case that no answer can pass, as far as that can be proven from the case alone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraplex.grammar.builder.output_plan import plan_output
from loraplex.grammar.constraints import JsonSchema, OutputConstraints, SchemaLimits
from loraplex.grammar.errors import GrammarRefused, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.tools.call_syntax import ToolStyle
from loraplex.platform.errors import GatewayError, InvalidParameter
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.parameters.output_constraints import build_output_constraints
from loraplex.platform.parameters.request_models import ChatRequest
from loraplex.platform.parameters.request_object import read_object

MAX_CASES: Final = 10_000
MAX_SUITE_BYTES: Final = 64 << 20
MAX_LINE_BYTES: Final = 4 << 20
MAX_ANSWER_TOKENS: Final = 4096
DEFAULT_ANSWER_TOKENS: Final = 256
LINE_LIMITS: Final = BodyLimits(max_bytes=MAX_LINE_BYTES)
Text = Annotated[str, Field(max_length=65_536)]
Bounded = Annotated[list[Text], Field(min_length=1, max_length=128)]


class SuiteInvalid(InvalidParameter):
    """A line is no case, or its expectation can never hold. `param`: the line and its field, such as `3.expect.regex`."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class ExpectedCall(_Part):
    """A call of `name`; `arguments`: a subset of its arguments."""

    name: Text
    arguments: dict[str, Any] = Field(default_factory=dict)


class ExpectedChoice(_Part):
    """The answer is held to one of the texts `of`, and has to be `answer`."""

    of: Bounded
    answer: Text


class ExpectedLogprob(_Part):
    """The least log-probability, in nats, of `text` and its end as the whole answer."""

    text: Text
    value: Annotated[float, Field(le=0, allow_inf_nan=False)]


class Expectation(_Part):
    """What an answer has to be: everything that is given holds.

    `regex` is searched for (JSON Schema's dialect). `schema` and `json_subset` read the text as JSON. `tool_calls`: exactly these,
    in their order. `unaided`: the model would have written the same without grammar: each token is its likeliest.
    """

    exact: Text | None = None
    regex: Text | None = None
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    json_subset: Any = None
    tool_calls: Annotated[list[ExpectedCall], Field(max_length=128)] | None = None
    choice: ExpectedChoice | None = None
    logprob_at_least: ExpectedLogprob | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    unaided: Literal[True] | None = None

    @property
    def given(self) -> frozenset[str]:
        """The names of what is expected, as a case has them. Null is absent, but for `json_subset`, where it is a value."""
        given = (
            each for each in self.model_fields_set if each == "json_subset" or getattr(self, each) is not None
        )
        return frozenset("schema" if name == "json_schema" else name for name in given)


class Case(_Part):
    """A line of a suite. All but `id` and `expect` are fields of `/v1/chat/completions`, greedy unless `temperature` is given."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")] | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_ANSWER_TOKENS)] = DEFAULT_ANSWER_TOKENS
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    expect: Expectation

    def body(self, model: str, seed: int, salt: str) -> dict[str, Any]:
        """Return the body of its request. `salt` separates the cached prefixes of one report from all others."""
        fields = self.model_dump(exclude={"id", "expect"}, exclude_none=True)
        fields |= {"model": model, "seed": seed, "cache_salt": salt}
        if self.expect.unaided:
            fields |= {"logprobs": True, "top_logprobs": 1}
        if self.expect.choice is not None:
            fields["structured_outputs"] = {"choice": self.expect.choice.of}
        if self.expect.logprob_at_least is not None:
            texts = [self.expect.logprob_at_least.text]
            fields |= {"structured_outputs": {"choice": texts, "probabilities": True}, "max_tokens": 1}
        return fields


@dataclass(frozen=True, slots=True)
class Suite:
    """The cases of a file, by their places from 1. `sha256`: of the file's bytes, in hexadecimal digits."""

    sha256: str
    cases: Sequence[Case]

    def name_of(self, index: int) -> str:
        """Return what a report calls the case at `index`: its id, else its line."""
        return self.cases[index].id or str(index + 1)


class SuiteSummary(msgspec.Struct, frozen=True):
    """What a checked file is."""

    sha256: str
    cases: int


def check_suite(content: bytes) -> SuiteSummary:
    """Read a suite, for a worker process. Raises `SuiteInvalid`."""
    suite = read_suite(content)
    return SuiteSummary(suite.sha256, len(suite.cases))


def read_suite(content: bytes) -> Suite:
    """Read and check every case; blank lines count as lines only. Raises `SuiteInvalid`."""
    if len(content) > MAX_SUITE_BYTES:
        raise SuiteInvalid(f"A suite has at most {MAX_SUITE_BYTES} bytes.", "suite")
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_CASES:
        raise SuiteInvalid(f"A suite has 1 to {MAX_CASES} cases, one a line; this has {len(lines)}.", "suite")
    cases = [_read_case(number, line) for number, line in lines]
    names: set[str] = set()
    for (number, _), case in zip(lines, cases, strict=True):
        if case.id is not None and case.id in names:
            raise SuiteInvalid(f"Line {number}: `id` {case.id!r} is that of an earlier case.", f"{number}.id")
        names |= {case.id} if case.id is not None else set()
    return Suite(hashlib.sha256(content).hexdigest(), cases)


class _StoredCases(Sequence[Case]):
    """The cases of checked lines, each parsed when it is needed: together they take several times the file's memory."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return Case.model_validate_json(self._lines[index])


def parse_suite(content: bytes) -> Suite:
    """Parse a suite that was checked when it was stored."""
    lines = [line for line in content.splitlines() if line.strip()]
    return Suite(hashlib.sha256(content).hexdigest(), _StoredCases(lines))


def _read_case(number: int, line: bytes) -> Case:
    if len(line) > MAX_LINE_BYTES:
        raise SuiteInvalid(f"Line {number} is larger than {MAX_LINE_BYTES} bytes.", str(number))
    try:
        document = parse_object(line, LINE_LIMITS)
        case = Case.model_validate(document)
        request = read_object(ChatRequest, case.body("model", 0, "check"))
        constraints = build_output_constraints(request)
        if constraints is not None:
            plan_output(constraints, ToolStyle.GENERIC, limits=SchemaLimits())
        _refuse_impossible(case, constraints)
    except UnicodeDecodeError as error:
        raise SuiteInvalid(f"Line {number} is not UTF-8.", str(number)) from error
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:64] for part in details["loc"])
        raise SuiteInvalid(f"Line {number}: `{place}`: {details['msg']}.", f"{number}.{place}") from None
    except (GatewayError, GrammarRefused) as error:
        place = f"{number}.{error.param or 'expect'}"
        raise SuiteInvalid(f"Line {number}: {error}", place) from error
    return case


def _refuse_impossible(case: Case, constraints: OutputConstraints | None) -> None:
    """Raise `SuiteInvalid` or `GrammarRefused` for an expectation that no answer to the request meets."""
    expect = case.expect
    if not expect.given:
        raise SuiteInvalid("`expect` needs at least one of exact, regex, schema, json_subset, …", "expect")
    for name, schema in (("regex", _pattern(expect.regex)), ("schema", expect.json_schema)):
        if schema is not None:
            _check_schema(name, schema)
    must_call = constraints is not None and constraints.tool_choice == "required"
    may_call = constraints is not None and constraints.tool_choice != "none"
    texts = expect.given & {"exact", "regex", "schema", "json_subset", "choice", "logprob_at_least"}
    if texts and must_call:
        _impossible(min(texts), "the answer has to be a call")
    if (expect.tool_calls or expect.finish_reason == "tool_calls") and not may_call:
        _impossible("tool_calls", "the request allows no call")
    offered = {tool.name for tool in constraints.tools} if constraints is not None else set()
    for call in expect.tool_calls or ():
        if call.name not in offered:
            _impossible("tool_calls", f"no tool {call.name[:64]!r} may be called")
    if expect.tool_calls and texts:
        _impossible(min(texts), "the answer has to be calls, which have no text")
    if expect.choice is not None and expect.choice.answer not in expect.choice.of:
        _impossible("choice", "`answer` is not in `of`")
    if expect.logprob_at_least is not None and expect.given != {"logprob_at_least"}:
        _impossible("logprob_at_least", "it is scored, so that nothing else is answered")
    if expect.exact is not None and expect.choice is not None and expect.exact != expect.choice.answer:
        _impossible("exact", "`choice` expects another text")
    if expect.exact is not None and expect.regex is not None:
        _check_text(json.dumps(expect.exact), pattern_schema(expect.regex))
    formats = [expect.json_schema, _schema_of(constraints)]
    for each in (expect.exact, expect.choice.answer if expect.choice is not None else None):
        for schema in formats:
            if each is not None and schema is not None:
                _check_text(each, schema)


def _pattern(regex: str | None) -> dict[str, Any] | None:
    return None if regex is None else pattern_schema(regex)


def pattern_schema(regex: str) -> dict[str, Any]:
    """Return the JSON schema of texts in which `regex` is found: its engine bounds the steps of a search."""
    return {"type": "string", "pattern": regex}


def _check_schema(name: str, schema: Mapping[str, Any] | bool) -> None:
    """Raise `GrammarRefused` for a schema that is none, or that no document satisfies."""
    param = f"expect.{name}"
    Validator(schema if isinstance(schema, bool) else dict(schema), param=param)
    if schema is False:
        _impossible(name, "no document satisfies it")
    if name == "schema" and isinstance(schema, dict):
        wanted = OutputConstraints(format=JsonSchema(schema, False, param))
        plan_output(wanted, ToolStyle.GENERIC, limits=SchemaLimits())


def _schema_of(constraints: OutputConstraints | None) -> dict[str, Any] | None:
    wanted = None if constraints is None else constraints.format
    return wanted.schema if isinstance(wanted, JsonSchema) and isinstance(wanted.schema, dict) else None


def _check_text(text: str, schema: dict[str, Any] | bool) -> None:
    try:
        Validator(schema).validate(text)
    except SchemaNotSatisfied as error:
        _impossible("exact", f"the text does not meet the schema: {error}")


def _impossible(name: str, reason: str) -> None:
    raise SuiteInvalid(f"`expect.{name}` can never hold: {reason}.", f"expect.{name}")
