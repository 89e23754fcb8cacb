"""The tool-call parser on outputs whose calls are known, however the text is split."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.errors import SchemaNotSatisfied
from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ArgumentsDelta,
    ContentDelta,
    EngineReason,
    OutputDelta,
    ToolCallStart,
)
from loraplex.grammar.parsing.tool_call_parser import (
    ToolCallFormat,
    ToolCallParser,
    ToolCallPlacement,
    new_call_id,
)
from loraplex.grammar.tools.call_syntax import ToolStyle, syntax_of
from loraplex.grammar.tools.prompt_text import WrittenCall, render_calls

NAMES = ("get", "get_weather", "a-b_C9", "x" * 64)
NASTY = [
    "</tool_call>",
    "<tool_call>",
    '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
    '"}',
    '\\"}}',
    "}\n</tool_call>",
    "[TOOL_CALLS][",
    "; ",
    "{",
    "}]",
    "\\",
    "\n",
    "\u2028😀\x00",
    "ü",
]


@dataclass
class Read:
    """The joined deltas."""

    content: str
    calls: list[WrittenCall]
    reason: AnswerReason


def joined(deltas_read: Sequence[OutputDelta], reason: AnswerReason) -> Read:
    read = Read("", [], reason)
    for piece in deltas_read:
        match piece:
            case ContentDelta(text):
                assert text and not read.calls
                read.content += text
            case ToolCallStart(index, call_id, name):
                assert index == len(read.calls) and call_id == f"call_{index}"
                read.calls.append(WrittenCall(name, ""))
            case ArgumentsDelta(index, text):
                assert text and index == len(read.calls) - 1
                read.calls[index] = replace(read.calls[index], arguments=read.calls[index].arguments + text)
    return read


def refuse(schema: str, value: str) -> None:
    raise SchemaNotSatisfied(f"{value} by {schema}")


def call_format(
    style: ToolStyle, placement: ToolCallPlacement, names: Sequence[str] = NAMES
) -> ToolCallFormat:
    return ToolCallFormat(syntax_of(style), placement, dict.fromkeys(names))


def read(of: ToolCallFormat, deltas: Sequence[str], reason: EngineReason = "stop") -> Read:
    numbers = count()
    reader = ToolCallParser(of, refuse, call_id=lambda: f"call_{next(numbers)}")
    deltas_read = [piece for delta in deltas for piece in reader.feed(delta)]
    rest, answer_reason = reader.finish(reason)
    return joined([*deltas_read, *rest], answer_reason)


def auto(style: ToolStyle) -> ToolCallPlacement:
    return (
        ToolCallPlacement.REPLACE_TEXT if syntax_of(style).marker is None else ToolCallPlacement.FOLLOW_TEXT
    )


nasty_text = st.lists(st.sampled_from(NASTY) | st.text(max_size=5), max_size=4).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | nasty_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(nasty_text, inner, max_size=3),
    max_leaves=8,
)
arguments = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    st.dictionaries(nasty_text, values, max_size=4),
    st.sampled_from([None, 2]),
    st.booleans(),
)
calls = st.lists(st.builds(WrittenCall, st.sampled_from(NAMES), arguments), max_size=4)
styles = st.sampled_from(list(ToolStyle))


@st.composite
def answers(draw: st.DrawFn) -> tuple[ToolStyle, ToolCallPlacement, str, list[WrittenCall], str]:
    """Style, placement, text before the calls, calls, and the whole output."""
    style = draw(styles)
    syntax = syntax_of(style)
    made = draw(calls)
    if syntax.marker is None:
        before = "" if made else draw(nasty_text.filter(lambda text: not text.startswith("{")))
        return (
            style,
            ToolCallPlacement.REPLACE_TEXT,
            before,
            made,
            before + (render_calls(style, made) if made else ""),
        )
    marker = syntax.marker
    before = draw(
        nasty_text.map(lambda text: text.replace(marker, marker[:-1])).filter(lambda t: marker not in t)
    )
    if not made:
        return style, ToolCallPlacement.FOLLOW_TEXT, before, [], before
    blanks = draw(st.sampled_from(["", "\n", " \r\n\t"]))
    return (
        style,
        ToolCallPlacement.FOLLOW_TEXT,
        before.rstrip(" \t\r\n"),
        made,
        before.rstrip(" \t\r\n") + blanks + render_calls(style, made),
    )


def cut(text: str, places: Sequence[int]) -> list[str]:
    inside = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[first:last] for first, last in pairwise(inside)]


@given(answers(), st.lists(st.integers(0, 10_000), max_size=12))
def test_reads_what_was_meant_however_it_is_cut(
    answer: tuple[ToolStyle, ToolCallPlacement, str, list[WrittenCall], str], places: list[int]
) -> None:
    style, placement, before, meant, text = answer
    expected = Read(before, meant, "tool_calls" if meant else "stop")
    for deltas in ([text], list(text), cut(text, places)):
        assert read(call_format(style, placement), deltas) == expected


@given(answers(), st.integers(0, 10_000))
def test_a_truncated_answer_gives_a_beginning_of_what_was_meant(
    answer: tuple[ToolStyle, ToolCallPlacement, str, list[WrittenCall], str], place: int
) -> None:
    style, placement, _, meant, text = answer
    short = text[: place % (len(text) + 1)]
    whole = read(call_format(style, placement), [short], "length")
    assert whole.reason == "length"
    assert whole == read(call_format(style, placement), list(short), "length")
    assert whole.calls == [] or whole.calls[:-1] == meant[: len(whole.calls) - 1]
    if whole.calls:
        last = meant[len(whole.calls) - 1]
        assert whole.calls[-1].name == last.name and last.arguments.startswith(whole.calls[-1].arguments)


@given(
    styles,
    st.builds(WrittenCall, st.sampled_from(NAMES), arguments),
    st.sampled_from(list(ToolCallPlacement)),
)
def test_every_placement_parses_calls_alone(
    style: ToolStyle, call: WrittenCall, placement: ToolCallPlacement
) -> None:
    if placement is ToolCallPlacement.FOLLOW_TEXT:
        placement = auto(style)
    text = render_calls(style, [call, call])
    assert read(call_format(style, placement), list(text)) == Read("", [call, call], "tool_calls")


@given(st.text() | st.sampled_from(NASTY), styles, st.lists(st.integers(0, 1000), max_size=5))
def test_a_conforming_output_without_calls_is_content(text: str, style: ToolStyle, places: list[int]) -> None:
    syntax = syntax_of(style, beside_json=True)
    if text.startswith(syntax.beginning):
        return
    of = ToolCallFormat(syntax, ToolCallPlacement.REPLACE_TEXT, dict.fromkeys(NAMES))
    assert read(of, cut(text, places)) == Read(text, [], "stop")


@pytest.mark.parametrize("style", ToolStyle)
def test_an_unknown_name_is_no_call_beside_other_content(style: ToolStyle) -> None:
    syntax = syntax_of(style)
    for name in ("gett", "", "x" * 65, "x" * 500):
        text = syntax.beginning + name + syntax.before_arguments + "{}"
        of = call_format(style, ToolCallPlacement.REPLACE_TEXT)
        assert read(of, [text]) == read(of, list(text)) == Read(text, [], "stop")


@pytest.mark.parametrize("style", ToolStyle)
def test_arguments_come_as_they_are_written(style: ToolStyle) -> None:
    syntax = syntax_of(style)
    reader = ToolCallParser(call_format(style, ToolCallPlacement.BE_ALL), refuse, call_id=lambda: "id")
    assert reader.feed(syntax.beginning + "ge") == []
    assert reader.feed('t"') == [ToolCallStart(0, "id", "get")]
    assert reader.feed(syntax.before_arguments[1:] + '{"a') == [ArgumentsDelta(0, '{"a')]
    assert reader.feed('": "}') == [ArgumentsDelta(0, '": "}')]
    assert reader.feed('"}' + syntax.after_arguments) == [ArgumentsDelta(0, '"}')]
    assert reader.feed(syntax.closing) == []
    assert reader.finish("stop") == ([], "tool_calls")


def test_content_is_held_back_only_while_it_may_be_a_marker() -> None:
    reader = ToolCallParser(call_format(ToolStyle.HERMES, ToolCallPlacement.FOLLOW_TEXT), refuse)
    assert reader.feed("a <") == [ContentDelta("a")]
    assert reader.feed("tool_") == []
    assert reader.feed("x b") == [ContentDelta(" <tool_x b")]
    assert reader.feed(" \n") == []
    assert reader.finish("stop") == ([ContentDelta(" \n")], "stop")


def test_blanks_around_the_arguments_belong_to_neither() -> None:
    text = '{"name": "get", "parameters": \n{"a": [1]} \n}'
    assert read(call_format(ToolStyle.LLAMA3, ToolCallPlacement.BE_ALL), list(text)).calls == [
        WrittenCall("get", '{"a": [1]}')
    ]


@pytest.mark.parametrize("style", ToolStyle)
def test_a_stop_string_ends_the_answer_where_it_stands(style: ToolStyle) -> None:
    syntax = syntax_of(style)
    whole = syntax.beginning + "get" + syntax.before_arguments + "{}"
    assert read(call_format(style, auto(style)), [whole]) == Read("", [WrittenCall("get", "{}")], "stop")
    # Only the frame of the call is cut off: the call is whole.
    assert read(call_format(style, auto(style)), [whole + "}"]).reason == "tool_calls"
    assert read(call_format(style, auto(style)), [whole + "}"], "length").reason == "length"


@pytest.mark.parametrize("style", ToolStyle)
def test_text_outside_the_language_is_never_a_call(style: ToolStyle) -> None:
    syntax = syntax_of(style)
    head = syntax.beginning + "get" + syntax.before_arguments
    for text in (
        head + "[1]}",
        head + "{}, ",
        syntax.beginning + 'nope"',
    ):
        for deltas in ([text], list(text)):
            with pytest.raises(SchemaNotSatisfied):
                read(call_format(style, ToolCallPlacement.BE_ALL), deltas)
            assert read(call_format(style, ToolCallPlacement.BE_ALL), deltas, "length").reason == "length"


@pytest.mark.parametrize("style", ToolStyle)
def test_a_stop_token_that_the_user_wants_to_see_is_no_content(style: ToolStyle) -> None:
    text = render_calls(style, [WrittenCall("get", "{}")]) + "<|im_end|>"
    for deltas in ([text], list(text)):
        assert read(call_format(style, auto(style)), deltas) == Read(
            "", [WrittenCall("get", "{}")], "tool_calls"
        )


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("placement", ToolCallPlacement)
@pytest.mark.parametrize("style", ToolStyle)
def test_the_rest_of_a_cut_answer_is_dropped_after_a_call(
    style: ToolStyle, placement: ToolCallPlacement, reason: EngineReason
) -> None:
    if placement is ToolCallPlacement.FOLLOW_TEXT:
        placement = auto(style)
    first = WrittenCall("get", '{"a": "}"}')
    text = render_calls(style, [first, first])
    syntax = syntax_of(style)
    second_name = text.index(
        '"', text.index(syntax.separator + syntax.before_name) + len(syntax.before_name) + 2
    )
    for length in range(text.index(first.arguments) + len(first.arguments), second_name):
        cut_off = read(call_format(style, placement), list(text[:length]), reason)
        assert (cut_off.content, cut_off.calls) == ("", [first])
    with pytest.raises(SchemaNotSatisfied):
        read(call_format(style, placement), [text[: second_name - 1] + "nope" + text[second_name:]])


def test_only_finished_arguments_are_validated() -> None:
    syntax = syntax_of(ToolStyle.HERMES)
    text = render_calls(ToolStyle.HERMES, [WrittenCall("free", "{}"), WrittenCall("checked", '{"a": 1}')])
    of = ToolCallFormat(syntax, ToolCallPlacement.FOLLOW_TEXT, {"free": None, "checked": "false"})
    with pytest.raises(SchemaNotSatisfied, match='the arguments of checked: {"a": 1} by false'):
        read(of, list(text))
    assert read(of, [text], "length").reason == "length"
    cut_off = text[: text.rindex("}\n</tool")]
    assert read(of, [cut_off]).reason == "stop"


def test_finished_content_is_validated() -> None:
    of = ToolCallFormat(
        syntax_of(ToolStyle.HERMES), ToolCallPlacement.REPLACE_TEXT, {"get": None}, content="true"
    )
    with pytest.raises(SchemaNotSatisfied, match="<1> by true"):
        read(of, list("<1>"))
    assert read(of, ['{"a'], "length").reason == "length"
    assert read(of, ['{"a']).reason == "stop"
    assert read(of, [render_calls(ToolStyle.HERMES, [WrittenCall("get", "{}")])]).reason == "tool_calls"


def test_ids_are_long_and_differ() -> None:
    made = {new_call_id() for _ in range(100)}
    assert len(made) == 100
    assert all(len(each) == 29 and each.startswith("call_") for each in made)


def _seconds(style: ToolStyle, deltas: Callable[[int], Sequence[str]], size: int) -> float:
    reader = ToolCallParser(call_format(style, auto(style)), refuse)
    chunks = deltas(size)
    began = time.process_time()
    for chunk in chunks:
        reader.feed(chunk)
    return time.process_time() - began


LONG: Mapping[str, Callable[[int], Sequence[str]]] = {
    "blanks before a marker": lambda size: [" "] * size,
    "half markers": lambda size: ["<tool_cal"] * (size // 9),
    "escapes": lambda size: list('<tool_call>\n{"name": "get", "arguments": {"a": "' + "\\\\" * (size // 2)),
    "one delta": lambda size: ['<tool_call>\n{"name": "get", "arguments": {"a": "' + '\\"' * (size // 2)],
    "a name without end": lambda size: list('<tool_call>\n{"name": "' + "x" * size),
    "braces": lambda size: list('<tool_call>\n{"name": "get", "arguments": {"a": ' + "[" * size),
}


@pytest.mark.parametrize("case", LONG)
def test_time_grows_with_the_length_and_no_faster(case: str) -> None:
    short = min(_seconds(ToolStyle.HERMES, LONG[case], 20_000) for _ in range(3))
    long = min(_seconds(ToolStyle.HERMES, LONG[case], 160_000) for _ in range(2))
    # Eight times the text; a quadratic reader would need 64 times as long.
    assert long < 24 * short + 0.05
