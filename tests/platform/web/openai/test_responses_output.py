"""Items and events of responses as pure functions of what a model writes: equal however its text is cut, streamed or whole."""

import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.platform.parameters.request_parts import read_parameters
from tests.platform.web.openai.responses_events import checked_events, checked_response, replayed, without_ids

from loraplex.engine.messages import Delta, Finished, TokenLogprob
from loraplex.engine.sampling_params import SamplingParams
from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ArgumentsDelta,
    ContentDelta,
    EngineReason,
    OutputDelta,
    ReasoningDelta,
    ToolCallStart,
)
from loraplex.platform.errors import ModelNotFound, Overloaded, ShareExceeded, describe
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.parameters.responses_tools import ToolName
from loraplex.platform.web.openai.responses.envelope import Envelope, repeated
from loraplex.platform.web.openai.responses.events import ResponsesResponse
from loraplex.platform.web.openai.responses.input_text import InputText

TOOLS: Final[list[Any]] = [
    {"type": "function", "name": "find"},
    {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
    },
    {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "custom", "name": "write"}]},
]
NASTY: Final = ("</think>", 'a "b" \\ \n\t\u2028', "\N{GRINNING FACE}", "é\x7f", '"}', "{", "\\u0041", "")


@dataclass
class Answer:
    """What a model writes: kinds and texts in their order. A call's kind is its name."""

    parts: list[tuple[str, str]]
    reason: AnswerReason = "stop"

    def cut(self, seed: random.Random) -> list[list[OutputDelta]]:
        """The deltas of random pieces of the texts, in random groups."""
        deltas: list[OutputDelta] = []
        calls = 0
        for kind, text in self.parts:
            if kind not in ("thought", "text"):
                deltas.append(ToolCallStart(calls, f"call_{calls}", kind))
                calls += 1
            rest = text
            while rest:
                end = seed.randint(1, len(rest))
                deltas.append(self._delta(kind, calls - 1, rest[:end]))
                rest = rest[end:]
        groups: list[list[OutputDelta]] = [[]]
        for delta in deltas:
            if seed.random() < 0.5:
                groups.append([])
            groups[-1].append(delta)
        return groups

    def _delta(self, kind: str, call: int, text: str) -> OutputDelta:
        if kind == "thought":
            return ReasoningDelta(text)
        return ContentDelta(text) if kind == "text" else ArgumentsDelta(call, text)


@dataclass
class Output:
    """The parser of a generation that gives out prepared deltas: event i completes group i."""

    groups: list[list[OutputDelta]]
    reason: AnswerReason

    def parser(self) -> "Output":
        return self

    def feed(self, text: str) -> list[OutputDelta]:
        return self.groups[int(text)]

    async def finish(self, parser: Any, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        return [], self.reason


@dataclass
class Generated:
    """A generation that has ended."""

    output: Output
    logprobs: bool = False
    choices: int = 1
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    stats: RequestStats = field(
        default_factory=lambda: RequestStats(arrival=0.0, n=1, max_tokens=1, prompt_lengths=[1])
    )

    async def events(self) -> AsyncIterator[tuple[int, Any]]:
        for index in range(len(self.output.groups)):
            tokens = [TokenLogprob(index, -0.5, [])] if self.logprobs else None
            yield 0, Delta("r", 0, [index], str(index), tokens)
        yield 0, Finished("r", 0, "length" if self.output.reason == "length" else "stop", None)  # type: ignore[arg-type]


def response(**fields: Any) -> ResponsesResponse:
    body = read_parameters("responses", {"model": "m", "input": "hello", "tools": TOOLS, **fields})
    return ResponsesResponse(
        envelope=Envelope("resp_0", 1, repeated(body)),
        stream=True,
        names=body.tools.names,
        seal="sealed for m: {}".format if body.include else None,
        text=lambda token: (f"t{token}", b"t"),  # type: ignore[arg-type]
    )


async def streamed(of: ResponsesResponse, generation: Any) -> bytes:
    encoder = of.chunks(generation)
    sent = [encoder.opening()]
    async for choice, event in generation.events():
        if isinstance(event, Delta):
            sent.append(encoder.delta(choice, event))
        else:
            sent.append(await encoder.finished(choice, event))
    return b"".join([*sent, encoder.closing()])


def answer(seed: random.Random) -> Answer:
    """A random answer: perhaps thought, then perhaps text, then calls."""

    def text() -> str:
        return "".join(seed.choice(NASTY) for _ in range(seed.randint(1, 4))) + "."

    parts = [(kind, text()) for kind in ("thought", "text") if seed.random() < 0.6]
    for _ in range(seed.randint(0, 3)):
        name = seed.choice(["find", "patch", "n__write"])
        arguments = {"a": text()} if name == "find" else {"input": text()}
        parts.append((name, json.dumps(arguments, ensure_ascii=seed.random() < 0.5)))
    is_call = bool(parts) and parts[-1][0] not in ("thought", "text")
    return Answer(parts, seed.choice(["length", "tool_calls" if is_call else "stop"]))


async def test_streamed_equals_whole_over_1000_random_cuts() -> None:
    seed = random.Random(33)
    for number in range(1000):
        written = answer(seed)
        of = response(include=["reasoning.encrypted_content"])
        whole = checked_response(await of.collect(Generated(Output(written.cut(seed), written.reason))))  # type: ignore[arg-type]
        stream = await streamed(of, Generated(Output(written.cut(seed), written.reason)))
        if number % 10:
            last = json.loads(stream.rsplit(b"data: ", 1)[1])["response"]
        else:
            events = checked_events(stream)
            last = events[-1]["response"]
            assert replayed(events) == last["output"]
        assert without_ids(last) == without_ids(whole)
        check_output(written, whole)


def check_output(written: Answer, document: dict[str, Any]) -> None:
    """The items have the texts that the model wrote, each in its own channel."""
    assert document["status"] == ("incomplete" if written.reason == "length" else "completed")
    items = document["output"]
    if written.reason == "stop" and all(kind == "thought" for kind, _ in written.parts):
        assert items.pop()["content"][0]["text"] == ""
    assert len(items) == len(written.parts)
    for item, (kind, text) in zip(items, written.parts, strict=True):
        if kind == "thought":
            assert item["content"] == [{"type": "reasoning_text", "text": text}] and item["summary"] == []
            assert item["encrypted_content"] == f"sealed for m: {text}"
        elif kind == "text":
            assert item["content"][0]["text"] == text
        elif kind == "find":
            assert (item["name"], item["arguments"]) == ("find", text) and "namespace" not in item
        else:
            assert item["input"] == json.loads(text)["input"]
            assert (item.get("namespace"), item["name"]) == (
                ("n", "write") if kind != "patch" else (None, "patch")
            )
    assert [item["status"] for item in items[:-1]] == ["completed"] * (len(items) - 1)


async def test_the_order_of_events() -> None:
    groups: list[list[OutputDelta]] = [
        [ReasoningDelta("a")],
        [ReasoningDelta("b"), ContentDelta("c")],
        [ToolCallStart(0, "call_0", "find"), ArgumentsDelta(0, "{}")],
        [ToolCallStart(1, "call_1", "patch"), ArgumentsDelta(1, '{"input": "x"}')],
    ]
    events = checked_events(await streamed(response(), Generated(Output(groups, "tool_calls"))))
    text = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call, custom = "function_call_arguments", "custom_tool_call_input"
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(*text, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *done),
        *(*text, "output_text.delta", "output_text.done", *done),
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"),
        *("output_item.added", f"{custom}.delta", f"{custom}.done", "output_item.done"),
        "completed",
    ]
    assert "encrypted_content" not in events[-1]["response"]["output"][0]


CALL: Final[list[tuple[str, list[OutputDelta]]]] = [
    ("<tool_call>", []),
    ('{"name": "find", "arguments": ', [ToolCallStart(0, "call_0", "find")]),
    ("{}", [ArgumentsDelta(0, "{}")]),
    ("}", []),
    ("</tool_call>", []),
]


@pytest.mark.parametrize(
    ("steps", "scored"),
    [
        (
            [
                ("a", [ReasoningDelta("a")]),
                ("</think>", []),
                ("b ", [ContentDelta("b ")]),
                ("<", []),
                ("d", [ContentDelta("<d")]),
                *CALL,
            ],
            [["b "], ["<", "d"]],
        ),
        ([("<think>", []), ("</think>", []), ("a", [ContentDelta("a")])], [["a"]]),
        # Text is held back right after the thought, and comes with the next event.
        ([("a</think>b", [ReasoningDelta("a")]), ("<", []), ("c", [ContentDelta("b<c")])], [["<", "c"]]),
        (
            [
                ("a", [ReasoningDelta("a")]),
                ("</think>", []),
                ("b", []),
                ("<", []),
                ("c", [ContentDelta("b<c")]),
            ],
            [["b", "<", "c"]],
        ),
        ([*CALL, ("\n", []), ("a", [ContentDelta("\na")])], [["\n", "a"]]),
        # Two tokens write one character.
        ([("\ufffd", []), ("\ufffd", [ContentDelta("\N{GRINNING FACE}")])], [["\ufffd", "\ufffd"]]),
    ],
    ids=["all", "empty thought", "joined marker", "held back", "text after a call", "character"],
)
async def test_log_probabilities_are_those_of_text(
    steps: list[tuple[str, list[OutputDelta]]], scored: list[list[str]]
) -> None:
    halves = iter("\N{GRINNING FACE}".encode()[at : at + 2] for at in (0, 2))
    tokens = [(text, next(halves) if text == "\ufffd" else text.encode()) for text, _ in steps]
    of = replace(response(), text=tokens.__getitem__)  # type: ignore[arg-type]
    groups = [deltas for _, deltas in steps]
    events = checked_events(await streamed(of, Generated(Output(groups, "tool_calls"), logprobs=True)))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [[token["token"] for token in each["logprobs"]] for each in deltas] == scored
    [part] = [item["content"][0] for item in events[-1]["response"]["output"] if item["type"] == "message"]
    assert [token["token"] for token in part["logprobs"]] == [each for some in scored for each in some]


async def test_an_answer_cut_off_is_incomplete() -> None:
    groups: list[list[OutputDelta]] = [
        [ContentDelta("a"), ToolCallStart(0, "call_0", "patch")],
        [ArgumentsDelta(0, '{"input": "ab\\u26')],
    ]
    events = checked_events(await streamed(response(), Generated(Output(groups, "length"))))
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"} and last["completed_at"] is None
    text, call = last["output"]
    assert (text["status"], call["status"], call["input"]) == ("completed", "incomplete", "ab")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("x"), "server_error"),
        (Overloaded("x"), "server_error"),
        (SchemaNotSatisfied("x"), "server_error"),
        (ShareExceeded("x", limit="l"), "rate_limit_exceeded"),
        (ModelNotFound("x"), "invalid_prompt"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_its_failure(error: Exception, code: str) -> None:
    generation: Any = Generated(Output([[ContentDelta("a")], [ContentDelta("b")]], "stop"))
    encoder = response().chunks(generation)
    sent = encoder.opening() + encoder.delta(0, Delta("r", 0, [0], "0")) + encoder.failed(describe(error))
    *_, raised, last = checked_events(sent)
    assert raised["type"] == "error" and raised["error"]["message"] == raised["message"]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code and last["response"]["output"] == []


def arguments_of(text: str, *, ascii_only: bool, spaces: str = " ") -> str:
    return f'{{"input":{spaces}{json.dumps(text, ensure_ascii=ascii_only)}}}'


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60), max_size=8))
@example('\N{GRINNING FACE}é\x00"\\/\b\f\n\r\t', True, [])
def test_the_input_of_a_custom_tool_however_it_is_cut(
    text: str, ascii_only: bool, cuts: Sequence[int]
) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    arguments = arguments_of(text, ascii_only=ascii_only)
    for places in (sorted({*cuts}), range(len(arguments))):
        reader = InputText()
        ends = [*places, len(arguments)]
        pieces = [arguments[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        assert "".join(map(reader.feed, pieces)) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ud83dx", "\ufffdx"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83d\ud83d\ude00", "\ufffd\N{GRINNING FACE}"),
        (r"\ude00", "\ufffd"),
        (r"\/\u0041", "/A"),
    ],
)
def test_halves_of_surrogate_pairs_are_replaced(written: str, text: str) -> None:
    arguments = f'{{"input": "{written}"}}'
    assert InputText().feed(arguments) == text
    reader = InputText()
    assert "".join(map(reader.feed, arguments)) == text


def test_names_of_members_are_short_and_their_own() -> None:
    short, long = ToolName("function", "f", "n"), ToolName("function", "f" * 40, "n" * 40)
    assert short.call_name == "n__f" and len(long.call_name) == 64
    other = ToolName("function", "f" * 39 + "g", "n" * 40)
    assert long.call_name != other.call_name and long.call_name.startswith("n" * 40 + "__f")
