"""Every row of the table at its bounds and one step outside, generated from the table itself."""

import math
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.chat_messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Messages
from loraplex.platform.errors import (
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
)
from loraplex.platform.format_parameters import BOUNDS, ResponseFormat, StructuredOutputs
from loraplex.platform.parameter_kinds import (
    Boolean,
    Choice,
    Flags,
    Identifier,
    Integer,
    Kind,
    LogitBias,
    Metadata,
    Number,
    Refused,
    StopStrings,
    Text,
    TokenIds,
)
from loraplex.platform.parameters import (
    PARAMETERS,
    Endpoint,
    Parameter,
    read_parameters,
    render_markdown,
    sampling_fields,
)
from loraplex.platform.prompts_parameter import Prompts
from loraplex.platform.tool_parameters import MAX_DESCRIPTION_BYTES, ToolChoices, ToolDefinitions

README = Path(__file__).parents[2] / "platform" / "openai" / "README.md"
BEGIN, END = "<!-- parameters: generated -->\n", "<!-- end of parameters -->\n"
USER = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def allowed_tools(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def tool(name: str = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema(**fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {**SCHEMA["json_schema"], **fields}}  # type: ignore[dict-item]


BASE: dict[Endpoint, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "hello"},
    "tokenize": {"model": "m"},
}


def inside(kind: Kind) -> list[Any]:
    """Values at the bounds."""
    match kind:
        case Integer(low, high):
            return [low, high]
        case Number(low, high, low_allowed):
            return [low if low_allowed else math.nextafter(low, high), high, (low + high) / 2]
        case Boolean(only):
            return [True, False] if only is None else [only]
        case Text(longest, shortest):
            return ["a" * shortest, "a" * longest, "é" * (longest // 2)]
        case Choice(values):
            return list(values)
        case StopStrings(most, longest):
            return ["a", "a" * longest, ["a"] * most, []]
        case TokenIds(most):
            return [[0] * most, [], [2**31 - 1]]
        case LogitBias(most, bias):
            return [{str(i): bias.low for i in range(most)}, {"0": bias.high}, {}]
        case Metadata(most, _, value):
            return [{f"{i:064}": "a" * value.longest for i in range(most)}, {"a": ""}]
        case Flags(names):
            return [{}, dict.fromkeys(names, True), dict.fromkeys(names)]
        case Refused(_, harmless):
            return list(harmless)
        case Messages(most):
            return [
                [USER],
                [USER] * most,
                [{"role": "user", "content": [{"type": "text", "text": "a"}] * MAX_PARTS}],
                [{"role": "assistant", "tool_calls": [CALL] * MAX_CALLS}],
                [
                    {
                        "role": "assistant",
                        "tool_calls": [CALL],
                        "content": None,
                        "refusal": None,
                        "audio": None,
                    },
                    {"role": "tool", "tool_call_id": "c", "content": ""},
                ],
                [
                    {
                        "role": "assistant",
                        "content": "a",
                        "annotations": [],
                        "parsed": {},
                        "function_call": None,
                    }
                ],
            ]
        case Prompts(most):
            return ["a", ["a"] * most, [1], [[1], [2, 3]]]
        case Identifier(longest):
            return ["a", "a" * longest, "_-Z9"]
        case ResponseFormat():
            return [
                {"type": "text"},
                {"type": "json_object"},
                schema(name="n" * 64, description="", strict=None),
                schema(description="d" * MAX_DESCRIPTION_BYTES, strict=True),
            ]
        case StructuredOutputs():
            return [
                {"json": {"type": "object"}, "regex": None},
                {"json": '{"type": "object"}'},
                {"regex": "a" * BOUNDS.max_pattern_bytes, "close": False},
                {"choice": ["a"] * BOUNDS.max_choices, "close": True},
                {"grammar": "a" * BOUNDS.max_text_bytes},
                {"structural_tag": {}},
                {"structural_tag": "{}"},
                {"close": True},
            ]
        case ToolDefinitions(most):
            return [
                [],
                [tool(f"f{index}") for index in range(most)],
                [tool("f" * 64, description="d" * MAX_DESCRIPTION_BYTES, parameters={}, strict=True)],
                [tool(description=None, parameters=None, strict=None)],
            ]
        case ToolChoices(most):
            many = allowed_tools(*(f"f{index}" for index in range(most)), mode="required")
            return ["none", "auto", "required", NAMED, allowed_tools("f"), many]
    raise AssertionError(f"no bounds for {kind}")


def outside(kind: Kind) -> list[Any]:
    """Values one step outside, and values of other types."""
    match kind:
        case Integer(low, high):
            return [low - 1, high + 1, float(low), "1", True, [low]]
        case Number(low, high, low_allowed):
            beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.inf, math.nan]
            return [*beyond, 10**400, "1", True, *([] if low_allowed else [low])]
        case Boolean(only):
            return [0, 1, "true", *([] if only is None else [not only])]
        case Text(longest, shortest):
            return [
                "a" * (longest + 1),
                "é" * (longest // 2 + 1),
                1,
                ["a"],
                *(["a" * (shortest - 1)] if shortest else []),
            ]
        case Choice():
            return ["", "other", 1, []]
        case StopStrings(most, longest):
            return ["", [""], "a" * (longest + 1), ["a"] * (most + 1), [1], {"a": 1}]
        case TokenIds(most):
            return [[0] * (most + 1), [-1], [2**31], [True], [1.0], "1"]
        case LogitBias(most, bias):
            return [
                {str(i): 0 for i in range(most + 1)},
                {"-1": 0},
                {"x": 0},
                {"0": bias.high + 0.1},
                {"²": 0},
                [],
            ]
        case Metadata(most, key, value):
            many = {str(i): "" for i in range(most + 1)}
            return [
                many,
                {"a" * (key.longest + 1): ""},
                {"a": "a" * (value.longest + 1)},
                {"": ""},
                {"a": 1},
                [],
            ]
        case Flags(names):
            return [{"other": True}, {names[0]: 1}, []]
        case Refused():
            return [{"type": "json_object"}, [{}], "auto", True, 2]
        case Messages(most):
            return [
                [],
                [USER] * (most + 1),
                USER,
                "hello",
                [1],
                [{"role": "user"}],
                [{**USER, "role": "operator"}],
                [{"role": "assistant", "tool_calls": [CALL] * (MAX_CALLS + 1)}],
                [{**USER, "tool_calls": [CALL]}],
                [{"role": "tool", "content": "a"}],
                [{"role": "tool", "content": "a", "tool_call_id": "c"}],
            ]
        case Prompts(most):
            return ["", [], [""], [[]], ["a"] * (most + 1), [1, "a"], [-1], [True], 1, {}]
        case Identifier(longest):
            return ["", "a" * (longest + 1), "a b", "é", "a.b", "a\n", 1]
        case ResponseFormat():
            bad: list[Any] = [
                schema(name="n" * 65),
                schema(schema=None),
                schema(schema=True),
                schema(strict="yes"),
                schema(description="d" * (MAX_DESCRIPTION_BYTES + 1)),
                {**SCHEMA, "type": "json_object"},
            ]
            return [*bad, {}, {"type": "xml"}, {"type": "json_schema"}, "text", [], {"type": "text", "x": 1}]
        case StructuredOutputs():
            both = {"json": {}, "regex": "a"}
            wrong: list[Any] = [
                {"json": "["},
                {"json": "[]"},
                {"json": '{"a": NaN}'},
                {"json": 1},
                {"json": True},
            ]
            long = {"regex": "a" * (BOUNDS.max_pattern_bytes + 1)}
            longer: list[Any] = [
                {"grammar": "a" * (BOUNDS.max_text_bytes + 1)},
                {"json": " " * (BOUNDS.max_bytes + 1)},
            ]
            lists: list[Any] = [
                {"choice": []},
                {"choice": ["a"] * (BOUNDS.max_choices + 1)},
                {"choice": [""]},
            ]
            return [*wrong, *longer, *lists, both, long, {}, [], {"regex": ""}, {"close": 1}, {"xml": "a"}]
        case ToolDefinitions(most):
            return [
                [tool(f"f{index}") for index in range(most + 1)],
                [tool(), tool()],
                [tool("f" * 65)],
                [tool("a b")],
                [tool(description="d" * (MAX_DESCRIPTION_BYTES + 1))],
                [tool(parameters=[])],
                [tool(parameters=True)],
                [tool(strict=1)],
                [tool(other=1)],
                [{**tool(), "type": "custom"}],
                [{"type": "function"}],
                [{"function": {"name": "f"}}],
                [1],
                tool(),
            ]
        case ToolChoices(most):
            many = allowed_tools(*["f"] * (most + 1))
            modes: list[Any] = [allowed_tools(), allowed_tools("f", mode="none"), many]
            return [*modes, "any", 1, [], {}, tool("a b"), {"type": "function"}, {**NAMED, "x": 1}, tool(x=1)]
    raise AssertionError(f"no bounds for {kind}")


def cases(values: str) -> list[Any]:
    return [
        pytest.param(endpoint, row, id=f"{endpoint}-{row.name}-{values}")
        for row in PARAMETERS
        for endpoint in sorted(row.endpoints)
    ]


def body(endpoint: Endpoint, row: Parameter, value: object) -> dict[str, object]:
    needed = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}.get(row.name, {})
    return {**BASE[endpoint], **needed, row.name: value}


@pytest.mark.parametrize(("endpoint", "row"), cases("inside"))
def test_bounds_are_accepted(endpoint: Endpoint, row: Parameter) -> None:
    for value in inside(row.kind):
        values = read_parameters(
            endpoint,
            {
                **({"messages": [USER]} if endpoint == "tokenize" and row.name in ("model", "tools") else {}),
                **body(endpoint, row, value),
            },
        )
        if endpoint != "tokenize":
            SamplingParams(max_tokens=2_000_000, **sampling_fields(endpoint, values)).validate(
                vocab_size=2**31
            )


@pytest.mark.parametrize(("endpoint", "row"), cases("outside"))
def test_one_step_outside_is_refused_by_name(endpoint: Endpoint, row: Parameter) -> None:
    for value in outside(row.kind):
        with pytest.raises(InvalidParameter) as refused:
            read_parameters(endpoint, body(endpoint, row, value))
        assert (refused.value.param or "").startswith(row.name), value
        assert row.name in str(refused.value)


@pytest.mark.parametrize(("endpoint", "row"), cases("null"))
def test_null_counts_as_absent(endpoint: Endpoint, row: Parameter) -> None:
    if endpoint in row.required:
        with pytest.raises(MissingParameter) as missing:
            read_parameters(endpoint, body(endpoint, row, None))
        assert missing.value.param == row.name
    elif endpoint != "tokenize":
        assert read_parameters(endpoint, body(endpoint, row, None))[row.name] == row.default


@pytest.mark.parametrize("endpoint", ["chat", "completions", "tokenize"])
@pytest.mark.parametrize("name", ["temprature", "functions", "", "x" * 1000, "__class__"])
def test_unknown_names_are_refused(endpoint: Endpoint, name: str) -> None:
    with pytest.raises(UnknownParameter) as unknown:
        read_parameters(endpoint, {**BASE[endpoint], name: 1})
    assert unknown.value.param == name[:64]


@pytest.mark.parametrize(
    ("message", "error", "param"),
    [
        ({**USER, "refusal": "no"}, UnsupportedParameter, "messages[0].refusal"),
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
def test_messages_name_what_is_wrong(message: object, error: type[InvalidParameter], param: str) -> None:
    with pytest.raises(error) as refused:
        read_parameters("chat", {"model": "m", "messages": [message]})
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("response_format", schema(x=1), "response_format.json_schema.x"),
        ("structured_outputs", {"json_object": True}, "structured_outputs.json_object"),
        ("tools", [tool(), tool("g", mode=1)], "tools[1].function.mode"),
        ("tools", [{**tool(), "cache": 1}], "tools[0].cache"),
        ("tool_choice", {**NAMED, "x": 1}, "tool_choice.x"),
        ("tool_choice", {**allowed_tools("f"), "mode": "auto"}, "tool_choice.mode"),
    ],
)
def test_unknown_fields_inside_are_named_by_their_path(name: str, value: object, param: str) -> None:
    with pytest.raises(UnknownParameter) as unknown:
        read_parameters("chat", {**BASE["chat"], name: value})
    assert unknown.value.param == param


def test_defaults_of_a_profile_apply_where_the_request_is_silent() -> None:
    values = read_parameters("chat", {**BASE["chat"], "temperature": 0.5, "top_p": None})
    changed = values.with_defaults({"temperature": 0.1, "top_p": 0.2, "top_k": 3, "no parameter": 1})
    assert (changed["temperature"], changed["top_p"], changed["top_k"]) == (0.5, 0.2, 3)
    assert "no parameter" not in changed and values["top_k"] == 0 and values.with_defaults({}) is values


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    values = read_parameters("chat", {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert values["messages"][0].content == "ab"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ],
)
def test_parameters_that_do_not_go_together(extra: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("chat", {**BASE["chat"], **extra})
    assert refused.value.param == param


def test_tokenize_takes_messages_or_prompt() -> None:
    for extra in ({}, {"prompt": "a", "messages": [USER]}):
        with pytest.raises(InvalidParameter):
            read_parameters("tokenize", {"model": "m", **extra})


def test_tools_are_tokenized_with_messages_only() -> None:
    assert read_parameters("tokenize", {"model": "m", "messages": [USER], "tools": [tool()]})["tools"]
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("tokenize", {"model": "m", "prompt": "a", "tools": [tool()]})
    assert refused.value.param == "tools"


def test_the_longest_message_list_is_a_number() -> None:
    assert f"1..{MAX_MESSAGES}" in Messages().allowed


def test_the_documented_table_is_the_table() -> None:
    text = README.read_text()
    written = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert written.strip() == render_markdown().strip(), "write render_markdown() between the marks"


@pytest.mark.parametrize(
    "message", [{"content": None}, {"tool_calls": []}, {"content": None, "tool_calls": None}]
)
def test_an_assistant_may_have_said_nothing(message: dict[str, Any]) -> None:
    read = read_parameters("chat", {"model": "m", "messages": [{"role": "assistant", **message}]})
    assert read["messages"][0].content == "" and read["messages"][0].tool_calls == ()
