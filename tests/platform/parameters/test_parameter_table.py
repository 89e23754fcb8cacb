"""Every row of the table at its bounds and one step outside, generated from the table itself."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.platform.parameters import decision_bounds, message_bounds, nested_bounds, plain_bounds
from tests.platform.parameters.nested_bounds import ITEMS, NestedKind, response_tools_inside
from tests.platform.parameters.request_parts import (
    CALL,
    NAMED,
    USER,
    allowed_tools,
    read_parameters,
    schema,
    tool,
)

from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.errors import (
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
)
from loraplex.platform.parameters.parameter_table import (
    MODELS,
    PARAMETERS,
    Parameter,
)
from loraplex.platform.parameters.request_models import GenerationRequest
from loraplex.platform.parameters.request_object import default_text, read_reporting
from loraplex.platform.parameters.responses_request import INCLUDE_LOGPROBS
from loraplex.platform.parameters.value_types import Kind

PAGE = Path(__file__).parents[3] / "platform" / "parameters" / "parameters.md"
OF_MESSAGES = (
    *("model", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)
BASE: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "hello"},
    "responses": {"model": "m", "input": "hello"},
    "input_tokens": {"model": "m", "input": "hello"},
    "decisions": {"model": "m", "input": "hello", "questions": [decision_bounds.PREDICATE]},
    "tokenize": {"model": "m"},
    "detokenize": {"model": "m", "tokens": [1]},
    "messages": {"model": "m", "messages": [USER], "max_tokens": 1},
    "count_tokens": {"model": "m", "messages": [USER]},
}


def inside(kind: Kind) -> list[Any]:
    if message_bounds.knows(kind):
        return message_bounds.inside(kind)
    if decision_bounds.knows(kind):
        return decision_bounds.inside()
    return nested_bounds.inside(kind) if isinstance(kind, NestedKind) else plain_bounds.inside(kind)


def outside(kind: Kind) -> list[Any]:
    if message_bounds.knows(kind):
        return message_bounds.outside(kind)
    if decision_bounds.knows(kind):
        return decision_bounds.outside()
    return nested_bounds.outside(kind) if isinstance(kind, NestedKind) else plain_bounds.outside(kind)


def cases(values: str) -> list[Any]:
    return [
        pytest.param(endpoint, row, id=f"{endpoint}-{row.name}-{values}")
        for row in PARAMETERS
        for endpoint in sorted(row.endpoints)
    ]


def body(endpoint: str, row: Parameter, value: object) -> dict[str, object]:
    needed: dict[str, dict[str, object]] = {
        "stream_options": {"stream": True},
        "top_logprobs": {"include": [INCLUDE_LOGPROBS]} if endpoint == "responses" else {"logprobs": True},
        "max_tokens": {"echo": True} if endpoint == "completions" else {},
    }
    return {**BASE[endpoint], **needed.get(row.name, {}), row.name: value}


@pytest.mark.parametrize(("endpoint", "row"), cases("inside"))
def test_bounds_are_accepted(endpoint: str, row: Parameter) -> None:
    for value in inside(row.kind):
        values = read_parameters(
            endpoint,
            {
                **({"messages": [USER]} if endpoint == "tokenize" and row.name in OF_MESSAGES else {}),
                **({"prompt": "a"} if row.name == "add_special_tokens" else {}),
                **body(endpoint, row, value),
            },
        )
        if isinstance(values, GenerationRequest):
            SamplingParams(max_tokens=2_000_000, **values.sampling_fields()).validate(vocab_size=2**31)


@pytest.mark.parametrize(("endpoint", "row"), cases("document"))
def test_the_documented_schema_allows_what_is_accepted(endpoint: str, row: Parameter) -> None:
    schema = validator_of(endpoint)
    for value in inside(row.kind):
        schema.validate(body(endpoint, row, value))
    if endpoint not in row.required:
        schema.validate(body(endpoint, row, None))
    for wrong in (body(endpoint, row, object_of_no_kind()), {**body(endpoint, row, None), "other": 1}):
        assert not schema.is_valid(wrong)


@cache
def validator_of(endpoint: str) -> Any:
    return jsonschema_rs.Draft202012Validator(MODELS[endpoint].model_json_schema())


def object_of_no_kind() -> dict[str, Any]:
    """A value that no parameter allows."""
    return {"type": [], "": [None], "model": 1.5}


@pytest.mark.parametrize(("endpoint", "row"), cases("outside"))
def test_one_step_outside_is_refused_by_name(endpoint: str, row: Parameter) -> None:
    for value in outside(row.kind):
        with pytest.raises(InvalidParameter) as refused:
            read_parameters(endpoint, body(endpoint, row, value))
        assert (refused.value.param or "").startswith(row.name), value
        assert row.name in str(refused.value)


@pytest.mark.parametrize(("endpoint", "row"), cases("null"))
def test_null_counts_as_absent(endpoint: str, row: Parameter) -> None:
    if endpoint in row.required:
        with pytest.raises(MissingParameter) as missing:
            read_parameters(endpoint, body(endpoint, row, None))
        assert missing.value.param == row.name
    elif endpoint != "tokenize":
        assert getattr(read_parameters(endpoint, body(endpoint, row, None)), row.name) == row.default


UNKNOWN = {"foo": None, "mood": None, "x" * 1000: None}


@pytest.mark.parametrize(
    ("endpoint", "given"),
    [
        ("completions", {"stream_options": {"include_usage": True}, "stream": True}),
        ("completions", {"structured_outputs": {"regex": "a+"}}),
        ("tokenize", {"prompt": "hello"}),
        ("chat", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("chat", {"tools": [tool()], "tool_choice": NAMED}),
        ("chat", {"tools": [tool()], "tool_choice": allowed_tools("f")}),
        ("chat", {"response_format": schema()}),
        ("responses", {"input": ITEMS, "tools": response_tools_inside(3)[-1]}),
        ("decisions", {"input": ITEMS[:2], "questions": [decision_bounds.CHOICE, decision_bounds.SCORE]}),
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}),
    ],
)
def test_an_unknown_name_with_null_is_absent(endpoint: str, given: dict[str, Any]) -> None:
    """In every object of a body, but not in schemas, whose names are data."""
    body = {**BASE[endpoint], **given}
    read, plain = read_parameters(endpoint, with_nulls(body)), read_parameters(endpoint, body)
    assert (vars(read), read.model_fields_set) == (vars(plain), plain.model_fields_set)


def with_nulls(value: Any, name: str = "") -> Any:
    if isinstance(value, list):
        return [with_nulls(each) for each in value]
    if not isinstance(value, dict) or name in ("parameters", "schema"):
        return value
    return UNKNOWN | {key: with_nulls(each, key) for key, each in value.items()}


@pytest.mark.parametrize("endpoint", sorted(MODELS))
@pytest.mark.parametrize("name", ["temprature", "functions", "", "x" * 1000, "__class__"])
def test_unknown_names_are_refused(endpoint: str, name: str) -> None:
    with pytest.raises(UnknownParameter) as unknown:
        read_parameters(endpoint, {**BASE[endpoint], name: 1})
    assert unknown.value.param == name[:64]


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("response_format", schema(x=1), "response_format.json_schema.x"),
        ("structured_outputs", {"json_object": True}, "structured_outputs.json_object"),
        ("tools", [tool(), tool("g", mode=1)], "tools[1].function.mode"),
        ("tools", [{**tool(), "cache": 1}], "tools[0].cache"),
        ("tool_choice", {**NAMED, "x": 1}, "tool_choice.x"),
        ("tool_choice", {**allowed_tools("f"), "mode": "auto"}, "tool_choice.mode"),
        ("input", [{"role": "user", "content": "a", "x": 1}], "input[0].x"),
        ("tools", [{"type": "custom", "name": "f", "parameters": {}}], "tools[0].parameters"),
        ("text", {"format": {"type": "text", "x": 1}}, "text.format.x"),
    ],
)
def test_unknown_fields_inside_are_named_by_their_path(name: str, value: object, param: str) -> None:
    endpoint: str = "responses" if name in ("input", "text") or "custom" in str(value) else "chat"
    with pytest.raises(UnknownParameter) as unknown:
        read_parameters(endpoint, {**BASE[endpoint], name: value})
    assert unknown.value.param == param


def test_defaults_of_a_profile_apply_to_omitted_parameters() -> None:
    values = read_parameters("chat", {**BASE["chat"], "temperature": 0.5, "top_p": None})
    changed = values.with_defaults({"temperature": 0.1, "top_p": 0.2, "top_k": 3, "no parameter": 1})
    assert (changed.temperature, changed.top_p, changed.top_k) == (0.5, 0.2, 3)
    assert not hasattr(changed, "no parameter") and values.top_k == 0 and values.with_defaults({}) is values


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_contradictory_parameters(extra: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("chat", {**BASE["chat"], **extra}).template_values()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"chat_template_kwargs": {"a": 1, "b": None, "c": ""}}, {"a": 1, "c": ""}),
    ],
)
def test_what_a_template_is_given(given: dict[str, object], values: dict[str, object]) -> None:
    read = read_parameters("chat", {**BASE["chat"], **given})
    assert read.template_values() == values


def test_both_names_of_the_maximum_are_one_number() -> None:
    both = {"max_tokens": 7, "max_completion_tokens": 7}
    for endpoint in ("chat", "completions"):
        for given in (both, {"max_completion_tokens": 7}, {"max_tokens": 7}):
            assert read_parameters(endpoint, {**BASE[endpoint], **given}).requested_tokens == 7
        with pytest.raises(InvalidParameter) as refused:
            read_parameters(endpoint, {**BASE[endpoint], **both, "max_completion_tokens": 8})
        assert refused.value.param == "max_completion_tokens"


def test_top_p_0_is_greedy_and_an_empty_stop_is_none() -> None:
    fields = read_parameters("chat", {**BASE["chat"], "top_p": 0, "stop": "", "user": ""}).sampling_fields()
    assert (fields["temperature"], fields["top_p"], fields["stop"]) == (0.0, 1.0, ())


def test_unknown_names_are_left_out_and_named_where_they_are_reported() -> None:
    known: dict[str, Any] = {
        **BASE["chat"],
        "messages": [USER, {**USER, "content": [{"type": "text", "text": "hello"}]}],
        "tools": [tool(parameters={"mood": 1})],
    }
    body = {**known, "logit_processors": [1], "x" * 99: 1, "stream_options": None}
    body["messages"] = [
        {**USER, "mood": 1},
        {**USER, "mood": 2, "content": [{"type": "text", "text": "hello", "voice": 1}]},
    ]
    body["tools"] = [{**tool(parameters={"mood": 1}), "kind": 1}]
    read, unknown = read_reporting(MODELS["chat"], body)
    assert read == read_parameters("chat", known) and unknown is not None
    assert unknown.names == ("logit_processors", "x" * 99, "mood", "voice", "kind")
    assert unknown.refusal.param == "logit_processors"
    with pytest.raises(InvalidParameter) as refused:
        read_reporting(MODELS["chat"], {**body, "store": True})
    assert refused.value.param == "logit_processors" and "`store` is true" in str(refused.value)
    with pytest.raises(UnknownParameter):
        read_parameters("chat", body)
    assert read_reporting(MODELS["chat"], known) == (read, None)


def test_reported_names_are_a_safe_and_short_header() -> None:
    hostile = {"a\r\nx-evil: 1": 1, "é\0,": 1, "z" * 500: 1, **{f"n{index}": 1 for index in range(20)}}
    _, unknown = read_reporting(MODELS["chat"], {**BASE["chat"], **hostile})
    assert unknown is not None
    first, second, third, *others = unknown.header().split(", ")
    assert (first, second, third) == ("a%0D%0Ax-evil%3A%201", "%3F%00%2C", "z" * 64)
    assert others == [*(f"n{index}" for index in range(13)), "+7"]


def test_tokenize_takes_messages_or_prompt() -> None:
    for extra in ({}, {"prompt": "a", "messages": [USER]}):
        with pytest.raises(InvalidParameter):
            read_parameters("tokenize", {"model": "m", **extra})


def test_tools_are_tokenized_with_messages_only() -> None:
    assert read_parameters("tokenize", {"model": "m", "messages": [USER], "tools": [tool()]}).tools
    with pytest.raises(InvalidParameter) as refused:
        read_parameters("tokenize", {"model": "m", "prompt": "a", "tools": [tool()]})
    assert refused.value.param == "tools"


def test_the_documented_table_is_the_table() -> None:
    head, _, table = PAGE.read_text().partition("\n| ")
    assert head.startswith("# Parameters of `/v1`\n")
    assert f"| {table}" == render_markdown(), "write render_markdown() below the head"


def render_markdown() -> str:
    """Render the rows as Markdown, one line per row."""
    lines = ["| Parameter | Endpoints | Must be | Default | Meaning |", "|---|---|---|---|---|"]
    for row in PARAMETERS:
        default = "required" if row.required == row.endpoints else default_text(row.default)
        cells = (f"`{row.name}`", ", ".join(sorted(row.endpoints)), row.kind.allowed, default, row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
