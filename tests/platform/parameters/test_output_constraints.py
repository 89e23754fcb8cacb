"""The parameters of a request become one `OutputConstraints`, or None for plain text."""

from typing import Any

import pytest
from tests.platform.parameters.request_parts import read_parameters

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputConstraints,
    Regex,
    StructuralTag,
)
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.output_constraints import build_output_constraints

USER: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object"}


def tool(name: str, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f"), tool("g", parameters=SCHEMA, description="second", strict=True)]


def form_of(**parameters: object) -> OutputConstraints | None:
    body = {"model": "m", "messages": USER, **parameters}
    return build_output_constraints(read_parameters("chat", body))


def named(**parameters: object) -> OutputConstraints:
    form = form_of(**parameters)
    assert form is not None
    return form


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"structured_outputs": {"close": True}},
    ],
)
def test_requests_without_constraints_are_plain_text(parameters: dict[str, Any]) -> None:
    assert form_of(**parameters) is None


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            JsonSchema(SCHEMA, False, "response_format.json_schema.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JsonSchema(SCHEMA, True, "response_format.json_schema.schema"),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA, False, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": '{"type": "object"}'}},
            JsonSchema(SCHEMA, False, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ContextFreeGrammar('start: "a"')),
        ({"structured_outputs": {"structural_tag": '{"type": "x"}'}}, StructuralTag({"type": "x"})),
    ],
)
def test_formats(parameters: dict[str, Any], wanted: object) -> None:
    assert form_of(**parameters) == OutputConstraints(format=wanted)  # type: ignore[arg-type]


def test_tools_may_be_called_by_default() -> None:
    form = named(tools=TOOLS)
    assert (form.tool_choice, form.parallel, form.format) == ("auto", True, None)
    first, second = form.tools
    assert (first.name, first.description, first.strict) == ("f", "", False)
    assert first.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (second.parameters, second.strict, second.description) == (SCHEMA, True, "second")
    assert second.param == "tools[1].function.parameters"


def test_a_named_tool_is_required_once() -> None:
    form = named(tools=TOOLS, tool_choice=tool("g"))
    assert [each.name for each in form.tools] == ["g"]
    assert (form.tool_choice, form.parallel) == ("required", False)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_may_be_called(mode: str) -> None:
    allowed = {"mode": mode, "tools": [tool("g"), tool("g")]}
    form = named(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [each.name for each in form.tools] == ["g"]
    assert (form.tool_choice, form.parallel) == (mode, True)


def test_tools_and_a_format_are_combined() -> None:
    form = named(
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        response_format={"type": "json_object"},
        structured_outputs={"close": True},
    )
    assert form.format == JsonObject() and len(form.tools) == 2
    assert (form.tool_choice, form.parallel, form.close) == ("required", False, True)


def test_a_format_stays_where_no_tool_may_be_called() -> None:
    form = named(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    assert (form.tools, form.tool_choice) == ((), "none")


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "both",
        ),
        ({"tools": TOOLS, "tool_choice": tool("h")}, "tool_choice", "'h'"),
        ({"tool_choice": tool("f")}, "tool_choice", "`tools` is empty"),
        ({"tool_choice": "required"}, "tool_choice", "`tools` is empty"),
    ],
)
def test_contradictory_constraints(parameters: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as refused:
        form_of(**parameters)
    assert refused.value.param == param


def test_completions_have_formats_and_no_tools() -> None:
    body = {"model": "m", "prompt": "a", "structured_outputs": {"regex": "a", "close": True}}
    form = build_output_constraints(read_parameters("completions", body), fast_forward=False)
    assert form == OutputConstraints(format=Regex("a"), close=True, fast_forward=False)
