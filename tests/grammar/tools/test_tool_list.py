"""Names and schemas of tools before anything is compiled."""

from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits, Tool
from loraplex.grammar.errors import GrammarRefused, GrammarTooLarge
from loraplex.grammar.tools.tool_list import arguments_schema, check_tools


def tool(name: str = "f", parameters: Any = None, index: int = 0) -> Tool:
    return Tool(name, "", parameters or {}, False, f"tools[{index}].function.parameters")


@pytest.mark.parametrize("name", ["f", "a-b_C9", "x" * 64])
def test_names_as_openai_allows_them(name: str) -> None:
    check_tools([tool(name)], SchemaLimits())


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "ä", 'a"', "a.b", "a\n", "٣"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        check_tools([tool("ok"), tool(name, index=1)], SchemaLimits())
    assert refused.value.param == "tools[1].function.name"


def test_a_name_stands_for_one_tool() -> None:
    with pytest.raises(GrammarRefused, match="'f'") as refused:
        check_tools([tool("f"), tool("g", index=1), tool("f", index=2)], SchemaLimits())
    assert refused.value.param == "tools[2].function.name"


def test_too_many_tools_are_counted() -> None:
    tools = [tool(f"f{number}", index=number) for number in range(129)]
    check_tools(tools[:128], SchemaLimits())
    with pytest.raises(GrammarTooLarge, match=r"129 .* 128"):
        check_tools(tools, SchemaLimits())


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ({}, {"type": "object"}),
        (True, {"type": "object"}),
        ({"properties": {}}, {"properties": {}, "type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}, "type": "object"},
        ),
    ],
)
def test_arguments_are_an_object_always(parameters: Any, schema: Any) -> None:
    assert arguments_schema(tool(parameters=parameters)) == schema


@pytest.mark.parametrize(
    "parameters", [{"type": "array"}, {"type": ["string", "null"]}, {"type": []}, {"type": 1}]
)
def test_arguments_that_are_never_an_object_are_refused(parameters: Any) -> None:
    with pytest.raises(GrammarRefused) as refused:
        arguments_schema(tool(parameters=parameters))
    assert refused.value.param == "tools[0].function.parameters"


def test_the_schema_false_is_refused() -> None:
    with pytest.raises(GrammarRefused):
        arguments_schema(Tool("f", "", False, False, "tools[0].function.parameters"))
