"""Messages are parsed completely, or refused with the path of the invalid field."""

from typing import Any

import pytest
from tests.platform.parameters.request_parts import CALL, USER, read_parameters

from loraplex.platform.errors import (
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
)
from loraplex.platform.parameters.chat_messages import MAX_MESSAGES, Messages


@pytest.mark.parametrize(
    ("message", "error", "param"),
    [
        ({**USER, "refusal": "no"}, UnknownParameter, "messages[0].refusal"),
        ({**USER, "reasoning": "so"}, UnknownParameter, "messages[0].reasoning"),
        ({**USER, "audio": {"id": "a"}}, UnsupportedParameter, "messages[0].audio"),
        (
            {"role": "assistant", "reasoning_content": ["so"]},
            InvalidParameter,
            "messages[0].reasoning_content",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": 1}]},
            InvalidParameter,
            "messages[0].content[0].refusal",
        ),
        ({**USER, "tool_calls": []}, InvalidParameter, "messages[0].tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": ""}]},
            InvalidParameter,
            "messages[0].tool_calls[0].id",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
            InvalidParameter,
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f"}}]},
            MissingParameter,
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": "c"}, InvalidParameter, "messages[0].tool_call_id"),
        ({**USER, "mood": "good"}, UnknownParameter, "messages[0].mood"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            UnsupportedParameter,
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "x": 1}]},
            UnknownParameter,
            "messages[0].content[0].x",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, InvalidParameter, "messages[0].content[0].text"),
        ({"role": "user", "content": None}, MissingParameter, "messages[0].content"),
        ({**USER, "name": ""}, InvalidParameter, "messages[0].name"),
    ],
)
def test_errors_name_the_invalid_field(message: object, error: type[InvalidParameter], param: str) -> None:
    with pytest.raises(error) as refused:
        read_parameters("chat", {"model": "m", "messages": [message]})
    assert refused.value.param == param


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    values = read_parameters("chat", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert values.messages[0].content == "ab"


def test_the_longest_message_list_is_a_number() -> None:
    assert f"1..{MAX_MESSAGES}" in Messages().allowed


@pytest.mark.parametrize(
    "message", [{"content": None}, {"tool_calls": []}, {"content": None, "tool_calls": None}]
)
def test_an_assistants_message_may_be_empty(message: dict[str, Any]) -> None:
    read = read_parameters("chat", {"model": "m", "messages": [{"role": "assistant", **message}]})
    assert read.messages[0].content == "" and read.messages[0].tool_calls == ()
