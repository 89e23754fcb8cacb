"""What a model answered to a case, and which of the case's expectations it does not meet.

Invariant: nothing of a suite runs without bounds: texts are matched by the validator that holds answers to their schemas.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from loraplex.grammar.errors import JsonRefused, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.strict_json import parse_json
from loraplex.platform.evaluations.suite import Case, Expectation, pattern_schema

MAX_CHARACTERS: Final = 4000
"""Of a graded text, and of one call's arguments; what is longer is cut."""
_MAX_DIGITS: Final = 400
Validate: TypeAlias = Callable[[str, str], Awaitable[None]]
"""(schema, value), both JSON texts. Raises `SchemaNotSatisfied`."""


class Call(msgspec.Struct, frozen=True):
    """A tool call. `arguments`: the JSON text as the model wrote it."""

    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one case, without ids and times, so that equal answers are equal.

    `error`: the code of the error that came instead. `logprob`: of the scored text. `failed`: the expectations it does not meet.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str = ""
    error: str = ""
    unaided: bool = False
    logprob: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server sent: the status and the document of HTTP, its headers in lower case, and how long it took in seconds."""

    status: int
    document: Mapping[str, Any]
    headers: Mapping[str, str]
    seconds: float


async def grade(case: Case, reply: Reply, validate: Validate) -> Answer:
    """Read a reply, and grade it by what the case expects. A long answer is graded whole and kept in part."""
    answer = _read(reply)
    failed = (
        ["error"]
        if answer.error
        else [n for n in _ORDER if not await _holds(n, case.expect, answer, validate)]
    )
    return msgspec.structs.replace(
        answer,
        text=answer.text[:MAX_CHARACTERS],
        calls=tuple(Call(each.name, each.arguments[:MAX_CHARACTERS]) for each in answer.calls),
        failed=tuple(failed),
    )


async def validate_here(schema: str, value: str) -> None:
    """Validate in this process: for suites of one's own."""
    Validator(json.loads(schema)).validate(value)


def _read(reply: Reply) -> Answer:
    usage = reply.document.get("usage") or {}
    if reply.status != 200:
        error = reply.document.get("error") or {}
        return Answer(error=str(error.get("code") or f"http_{reply.status}"))
    [choice] = reply.document["choices"]
    message, scored = choice["message"], choice.get("choice_probabilities") or []
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return Answer(
        text=message.get("content") or "",
        calls=tuple(Call(each["name"], each["arguments"]) for each in functions),
        finish_reason=choice["finish_reason"],
        unaided=_is_unaided(choice.get("logprobs")),
        logprob=scored[0]["logprob"] if scored else None,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
    )


def _is_unaided(logprobs: Mapping[str, Any] | None) -> bool:
    """Whether each token was the likeliest before any mask: then decoding without grammar writes the same (by induction)."""
    tokens = (logprobs or {}).get("content") or []
    return bool(tokens) and all(each["logprob"] >= each["top_logprobs"][0]["logprob"] for each in tokens)


async def _holds(name: str, expect: Expectation, answer: Answer, validate: Validate) -> bool:
    if name not in expect.given:
        return True
    if name == "regex" and expect.regex is not None:
        return await _satisfies(validate, pattern_schema(expect.regex), json.dumps(answer.text))
    if name == "schema":
        return await _satisfies(validate, expect.json_schema, answer.text)
    if name == "json_subset":
        return _contains(_parsed(answer.text), expect.json_subset)
    if name == "tool_calls" and expect.tool_calls is not None:
        wanted = [{"name": call.name, "arguments": call.arguments} for call in expect.tool_calls]
        called = [{"name": call.name, "arguments": _parsed(call.arguments)} for call in answer.calls]
        return _contains(called, wanted)
    if name == "choice" and expect.choice is not None:
        return answer.text == expect.choice.answer
    if name == "logprob_at_least" and expect.logprob_at_least is not None:
        return answer.logprob is not None and answer.logprob >= expect.logprob_at_least.value
    return bool(getattr(answer, {"exact": "text"}.get(name, name)) == getattr(expect, name))


_ORDER: Final = (
    *("exact", "regex", "schema", "json_subset", "tool_calls", "choice"),
    *("logprob_at_least", "finish_reason", "unaided"),
)


async def _satisfies(validate: Validate, schema: object, value: str) -> bool:
    try:
        await validate(json.dumps(schema), value)
    except SchemaNotSatisfied:
        return False
    return True


_NO_JSON: Final = object()


def _parsed(text: str) -> Any:
    """Return the JSON value of a text; for any other text a value that contains and equals nothing."""
    try:
        return parse_json(text, max_digits=_MAX_DIGITS)
    except (JsonRefused, ValueError):
        return _NO_JSON


def _contains(value: Any, wanted: Any) -> bool:
    """Whether `value` has all of `wanted`: objects may have more members; lists have as many items, in the same order."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(
            name in value and _contains(value[name], each) for name, each in wanted.items()
        )
    if isinstance(wanted, list):
        pairs = zip(value, wanted) if isinstance(value, list) and len(value) == len(wanted) else ((0, 1),)
        return all(_contains(*pair) for pair in pairs)
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
