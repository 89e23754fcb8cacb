"""Requests constrained responses from the live server, streamed or whole, and checks each with a validator that the server does not use."""

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jsonschema
from openai import APIError, OpenAI, UnprocessableEntityError
from tests.end_to_end.live_server import LiveServer
from tests.end_to_end.schemas import Form

QUESTIONS = (
    "Describe a place you like.",
    "Plan a small party for next week.",
    "What is the weather in Paris?",
    "Write down an order of three books.",
)
CHECKER = jsonschema.FormatChecker(("date", "uuid", "ipv4", "email"))
INSTANT = re.compile(r"\d{4}-\d\d-(\d\d)[Tt]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]\d\d:\d\d)")


def is_instant(value: object) -> bool:
    """RFC 3339, with the days of the calendar."""
    if not isinstance(value, str):
        return True
    return INSTANT.fullmatch(value) is not None and bool(CHECKER.conforms(value[:10], "date"))


CHECKER.checks("date-time")(is_instant)


@dataclass(frozen=True)
class RequestCase:
    """One request. `form` None: an unconstrained row."""

    number: int
    form: Form | None
    streamed: bool
    close: bool
    max_tokens: int


@dataclass
class Result:
    """A response. `calls`: name and arguments by index. `unsatisfied`: the validator's 422, or its event in a stream."""

    content: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    reason: str | None = None
    tokens: int = 0
    unsatisfied: bool = False


def ask(demo: LiveServer, order: RequestCase) -> Result:
    """Raises whatever the client raises, above all a timeout when the answer hangs."""
    owners = sorted(demo.owners().items())
    model, tenant = owners[order.number % len(owners)]
    client = demo.client(tenant)
    try:
        return streamed(client, model, order) if order.streamed else whole(client, model, order)
    except UnprocessableEntityError as error:
        assert error.code == "schema_not_satisfied", error
    except APIError as error:
        assert error.code == "schema_not_satisfied", error
    return Result(unsatisfied=True)


def whole(client: OpenAI, model: str, order: RequestCase) -> Result:
    answer = client.chat.completions.create(model=model, **options(order))
    (choice,) = answer.choices
    calls = {
        index: (call.function.name, call.function.arguments)
        for index, call in enumerate(choice.message.tool_calls or ())
        if call.type == "function"
    }
    tokens = answer.usage.completion_tokens if answer.usage else 0
    return Result(choice.message.content or "", calls, choice.finish_reason, tokens)


def streamed(client: OpenAI, model: str, order: RequestCase) -> Result:
    result = Result()
    create: Any = client.chat.completions.create
    usage = {"include_usage": True}
    for chunk in create(model=model, stream=True, stream_options=usage, **options(order)):
        result.tokens = chunk.usage.completion_tokens if chunk.usage else result.tokens
        for choice in chunk.choices:
            assert result.reason is None, "nothing follows the reason"
            result.reason = choice.finish_reason
            result.content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                name, arguments = result.calls.get(piece.index, ("", ""))
                assert not (name and piece.function.name), "a name comes once and whole"
                result.calls[piece.index] = (
                    name or piece.function.name or "",
                    arguments + (piece.function.arguments or ""),
                )
    return result


def options(order: RequestCase) -> dict[str, Any]:
    """The request but for model and stream."""
    question = QUESTIONS[order.number % len(QUESTIONS)]
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 1.0,
        "seed": order.number,
        "max_tokens": order.max_tokens,
    }
    form = order.form
    if form is None:
        return fields
    if form.tools:
        fields["tools"] = [tool(name, schema, form.strict) for name, schema in form.tools.items()]
        named = {"type": "function", "function": {"name": form.choice}}
        fields["tool_choice"] = named if form.choice in form.tools else form.choice
        fields["parallel_tool_calls"] = order.number % 2 == 0
    extra: dict[str, Any] = {"close": True} if order.close else {}
    if form.schema is not None:
        if order.number % 3 == 0 and not form.strict:
            extra["json"] = form.schema
        else:
            wanted = {"name": "answer", "schema": form.schema, "strict": form.strict}
            fields["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return fields | ({"extra_body": {"structured_outputs": extra}} if extra else {})


def tool(name: str, parameters: dict[str, Any], strict: bool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def verdict(order: RequestCase, result: Result) -> str:
    """Check a response and return its kind. Raises `AssertionError` or the validator's error for a wrong one."""
    form = order.form
    if result.unsatisfied:
        assert form is not None and form.needs_validator, "only schemas that no grammar enforces may fail"
        return "unsatisfied"
    if form is None:
        assert result.reason in ("stop", "length") and not result.calls
        return "plain"
    if result.reason == "length":
        assert result.tokens == order.max_tokens, "truncated is what reached its limit"
        return "truncated"
    if result.calls:
        check_calls(form, order, result)
        return "calls"
    assert result.reason == "stop"
    if form.schema is not None:
        valid(result.content, form.schema)
        return "document"
    assert form.choice == "auto", "a required call was not made"
    return "text"


def check_calls(form: Form, order: RequestCase, result: Result) -> None:
    assert result.reason == "tool_calls"
    assert sorted(result.calls) == list(range(len(result.calls)))
    assert order.number % 2 == 0 or len(result.calls) == 1, "parallel_tool_calls was false"
    for name, arguments in result.calls.values():
        assert name in form.tools
        assert form.choice not in form.tools or name == form.choice
        valid(arguments, form.tools[name])


def valid(text: str, schema: dict[str, Any]) -> None:
    """Raises unless `text` is one JSON document of the schema, read as clients do: of a name that occurs twice the last counts."""
    value = json.loads(text, parse_constant=refuse)
    jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(value)


def refuse(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def orders(forms: tuple[Form, ...], count: int, max_tokens: int) -> list[RequestCase]:
    """Every form in turn, every sixth row unconstrained, half of them streamed, a third closed at the end."""
    drawn = itertools.cycle(forms)
    return [
        RequestCase(
            number,
            None if number % 6 == 5 else next(drawn),
            streamed=number // 2 % 2 == 0,
            close=number % 3 == 1,
            max_tokens=max_tokens,
        )
        for number in range(count)
    ]


def summary(kinds: Counter[str], tokens: int, seconds: float) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{kinds.total()} generations: {counts}; {tokens} tokens in {seconds:.0f} s"
