"""The writer alone: a whole message is what its events add up to, however the deltas are cut."""

import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from tests.platform.web.anthropic.wire import added_up, events_of, message_of, without_ids

from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ArgumentsDelta,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallStart,
)
from loraplex.platform.inference.answer_parser import AnswerParser
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.server.secret import derive
from loraplex.platform.web.anthropic.message_events import MessageEvents, MessageResponse

SEAL = ThoughtSeal(partial(derive, b"secret"), UUID(int=1))
PLAIN: Any = SimpleNamespace(output=None, choices=1)
CUTS = 1000
ROME = '{"city": "Röme", "n": 1.5}'
ANSWERS: list[tuple[list[OutputDelta], AnswerReason]] = [
    ([ReasoningDelta("I think.\n"), ContentDelta("Grüße, </think>!")], "stop"),
    (
        [
            ReasoningDelta("So?"),
            ContentDelta("I ask."),
            ToolCallStart(0, "call_a", "get_weather"),
            ArgumentsDelta(0, ROME),
            ToolCallStart(1, "call_b", "get_time"),
            ArgumentsDelta(1, "{}"),
        ],
        "tool_calls",
    ),
    ([ToolCallStart(0, "call_a", "get_weather"), ArgumentsDelta(0, '{"city": "Rome", "day": "Mo')], "length"),
    ([ToolCallStart(0, "call_a", "get_weather")], "length"),
    ([ReasoningDelta("Hm")], "length"),
    ([], "stop"),
]


def writer(*, shows_thought: bool = True, has_markers: bool = False) -> MessageEvents:
    stats = RequestStats(arrival=0.0, n=1, max_tokens=9, prompt_lengths=[12])
    stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens, stats.reasoning_tokens = 12, 5, 7, 3
    response = MessageResponse(
        id="msg_1",
        model="m",
        stream=True,
        shows_thought=shows_thought,
        has_markers=has_markers,
        request_id="r",
        seal=SEAL,
    )
    return MessageEvents(response, stats, AnswerParser(PLAIN))


def written(deltas: list[OutputDelta], reason: AnswerReason, **how: bool) -> tuple[list[Any], dict[str, Any]]:
    """The events of a stream, and the whole message."""
    one = writer(**how)
    stream = (
        one.opening()
        + b"".join(one.write([delta]) for delta in deltas)
        + one.stop(reason, None)
        + one.closing()
    )
    return events_of(stream.decode()), message_of(one.message())


def cut(deltas: list[OutputDelta], dice: random.Random) -> list[OutputDelta]:
    pieces: list[OutputDelta] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            pieces.append(delta)
            continue
        left = delta.text
        while left:
            size = dice.randint(1, len(left))
            piece, left = left[:size], left[size:]
            pieces.append(replace(delta, text=piece))
    return pieces


def test_streamed_equals_whole_over_random_cuts() -> None:
    dice = random.Random(33)
    for number in range(CUTS):
        deltas, reason = ANSWERS[number % len(ANSWERS)]
        events, whole = written(cut(deltas, dice), reason)
        assert added_up(events) == without_ids(whole) == without_ids(written(deltas, reason)[1])


def test_the_order_of_events() -> None:
    deltas, reason = ANSWERS[1]
    events, whole = written(deltas, reason)
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 3,
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if "index" in event] == [
        *[0] * 4,
        *[1] * 3,
        *[2] * 3,
        *[3] * 3,
    ]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use" and whole["content"][2]["input"] == json.loads(ROME)


@pytest.mark.parametrize("shows_thought", [True, False])
def test_the_signature_is_the_sealed_thought(shows_thought: bool) -> None:
    events, whole = written(*ANSWERS[0], shows_thought=shows_thought)
    thought = whole["content"][0]
    assert SEAL.open("m", thought["signature"], "p") == "I think.\n"
    assert thought["thinking"] == ("I think.\n" if shows_thought else "")
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [*["thinking_delta"] * shows_thought, "signature_delta", "text_delta"]
    assert added_up(events) == without_ids(whole)


def test_a_call_cut_off_has_the_members_that_are_complete() -> None:
    inputs = [written(*answer)[1]["content"][0]["input"] for answer in ANSWERS[2:4]]
    assert inputs == [{"city": "Rome"}, {}]


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 500 + "]" * 500 + "}", '{"a": 1e999}', '{"a": 123456789012345678901234567890}']
)
def test_a_whole_call_has_its_arguments_as_they_were_written(text: str) -> None:
    one = writer()
    one.write([ToolCallStart(0, "call_a", "f"), ArgumentsDelta(0, text)])
    one.stop("tool_calls", None)
    assert f'"input":{text}'.encode() in one.message()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"a": ' + "[" * 500, {}),
        ('{"a": 1e999, "b": "x', {"a": None}),
        ('{"a": 123456789012345678901234567890, "b": "x', {"a": 123456789012345678901234567890}),
    ],
)
def test_a_call_cut_off_is_always_an_object(text: str, wanted: dict[str, Any]) -> None:
    message = written([ToolCallStart(0, "call_a", "f"), ArgumentsDelta(0, text)], "length")[1]
    assert message["content"][0]["input"] == wanted


@pytest.mark.parametrize("has_markers", [True, False])
def test_usage_is_disjoint(has_markers: bool) -> None:
    usage = written([], "stop", has_markers=has_markers)[1]["usage"]
    created, computed = (7, 0) if has_markers else (0, 7)
    assert usage == {
        "input_tokens": computed,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": 5,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 3},
    }


def test_what_ended_a_message() -> None:
    for reason, text, wanted in (
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ):
        one = writer()
        one.stop(reason, text)  # type: ignore[arg-type]
        message = message_of(one.message())
        assert (message["stop_reason"], message["stop_sequence"]) == wanted
