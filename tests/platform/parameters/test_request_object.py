"""Errors of large bodies: few of them, short texts, and no content of a tenant."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.platform.parameters.request_parts import CALL, NAMED, SCHEMA, USER, read_parameters, tool

from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.parameters.chat_messages import TextPart
from loraplex.platform.parameters.parameter_table import MODELS

MANY = {f"name-{index}": "secret" for index in range(50_000)}
LONG = "secret" * 100_000
ASSISTANT = {"role": "assistant", "tool_calls": [CALL]}
BASE: dict[str, Any] = {"model": "m", "messages": [USER]}


def call_with(function: dict[str, Any]) -> dict[str, Any]:
    return {**ASSISTANT, "tool_calls": [{**CALL, "function": function}]}


@pytest.mark.parametrize(
    "extra",
    [
        MANY,
        {"messages": [{**USER, **MANY}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **MANY}]}]},
        {"messages": [call_with(MANY)]},
        {"messages": [{"role": "user"}] * 4096},
        {"messages": [{"role": "user", "content": [{"type": "image"}] * 4096}]},
        {"messages": [{**USER, "tool_calls": [LONG] * 10_000}]},
        {"tools": [tool(**MANY)]},
        {"tools": [{"type": "function"}] * 128},
        {"tool_choice": {**NAMED, **MANY}},
        {"response_format": {**SCHEMA, **MANY}},
        {"structured_outputs": {"choice": [1] * 1000}},
        {"structured_outputs": MANY},
        {"logit_bias": MANY},
        {"logit_bias": {str(index): "a" for index in range(1024)}},
        {"metadata": MANY},
        {"metadata": dict.fromkeys(map(str, range(16)), LONG)},
        {"stop_token_ids": ["a"] * 64},
        {"stop": [LONG] * 16},
        {"user": LONG, "cache_salt": LONG, "model": LONG},
        {"stream_options": MANY, "stream": True},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_a_large_body_has_few_errors_and_short_texts(extra: dict[str, Any]) -> None:
    body = BASE | extra
    with pytest.raises(ValidationError) as errors:
        MODELS["chat"].model_validate(body)
    assert errors.value.error_count() <= 4
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("chat", body)
    assert len(str(refused.value)) < 600 and len(refused.value.param or "") < 200
    assert refused.value.__cause__ is None and refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": ["secret"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": {"secret": 1}}]}, "messages[0].content"),
        ({"messages": [call_with({"name": "secret words", "arguments": "{}"})]}, None),
        ({"tools": [tool(description={"secret": 1})]}, "tools[0].function.description"),
        ({"tools": [tool("secret words")]}, "tools[0].function.name"),
        ({"tools": "secret"}, "tools"),
        ({"response_format": {**SCHEMA, "json_schema": {"name": "n", "schema": "secret"}}}, None),
        ({"structured_outputs": {"regex": "secret" * 1000}}, "structured_outputs.regex"),
        ({"stop": "secret" * 1000}, "stop"),
        ({"user": "secret" * 1000}, "user"),
    ],
)
def test_content_is_not_quoted(extra: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("chat", BASE | extra)
    assert param is None or refused.value.param == param
    assert "secret" not in str(refused.value).replace("messages[0]", "")


def test_schemas_are_not_read() -> None:
    nested: dict[str, Any] = {"$ref": "#", "type": 7}
    for _ in range(60):
        nested = {"properties": {"json_schema": nested}}
    read = read_parameters("chat", {**BASE, "tools": [tool(parameters=nested)]})
    assert read.tools[0].parameters == nested


def test_a_name_like_that_of_a_field_is_a_name() -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("chat", {**BASE, "metadata": {"[key]": 1}})
    assert refused.value.param == "metadata.[key]"
    with pytest.raises(UnknownParameter) as unknown:
        read_parameters("chat", {**BASE, "allowed": 1})
    assert unknown.value.param == "allowed"


class Unwritable(list[str]):
    """A list that must not be written as text, which may be as long as a body."""

    def __repr__(self) -> str:
        raise AssertionError("written")


def test_a_large_value_that_is_refused_is_not_written_as_text() -> None:
    with pytest.raises(InvalidParameter, match="`stop` is a list of 17, but must be a string or a list"):
        read_parameters("chat", {**BASE, "stop": Unwritable(["a"] * 17)})


def test_plain_parts_of_text_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextPart, "check", None)
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    request = read_parameters("chat", {**BASE, "messages": [{**USER, "content": parts}]})
    assert request.messages[0].content == "ab"
