"""Older forms of keywords in schemas without `$schema`: each is read in its one meaning, or refused by its place."""

from typing import Any

import pytest

from loraplex.grammar.builder.output_plan import plan_output
from loraplex.grammar.constraints import JsonSchema, OutputConstraints, SchemaLimits, Tool
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, SchemaNotEnforceable
from loraplex.grammar.json_schema.dialect import NEWEST, to_newest
from loraplex.grammar.tools.call_syntax import ToolStyle

LIMITS = SchemaLimits()


@pytest.mark.parametrize(
    ("before", "after", "slips"),
    [
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}, ["exclusiveMinimum"]),
        ({"maximum": 1.5, "exclusiveMaximum": True}, {"exclusiveMaximum": 1.5}, ["exclusiveMaximum"]),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}, ["exclusiveMaximum"]),
        ({"exclusiveMinimum": False}, {}, ["exclusiveMinimum"]),
        (
            {"$schema": NEWEST, "minimum": 1, "exclusiveMinimum": True},
            {"$schema": NEWEST, "exclusiveMinimum": 1},
            ["exclusiveMinimum"],
        ),
        ({"minimum": 0, "exclusiveMinimum": 1}, {"minimum": 0, "exclusiveMinimum": 1}, []),
        ({"items": [{"type": "null"}]}, {"prefixItems": [{"type": "null"}]}, ["items"]),
        (
            {"items": [{}], "additionalItems": {"items": [True]}},
            {"prefixItems": [{}], "items": {"prefixItems": [True]}},
            ["additionalItems", "items"],
        ),
        ({"items": [], "additionalItems": False}, {"items": False}, ["additionalItems", "items"]),
        (
            {"prefixItems": [{}], "additionalItems": False},
            {"prefixItems": [{}], "items": False},
            ["additionalItems"],
        ),
        # It has no meaning beside one schema for all items, in any draft.
        ({"items": {}, "additionalItems": False}, {"items": {}, "additionalItems": False}, []),
        (
            {"properties": None, "required": None, "enum": None, "items": None, "description": None},
            {},
            ["description", "enum", "items", "properties", "required"],
        ),
        ({"const": None, "default": None, "x": None}, {"const": None, "default": None, "x": None}, []),
        # PHP writes an empty object as an empty array.
        ({"properties": [], "$defs": []}, {}, ["$defs", "properties"]),
        (
            {"properties": {"a": {"required": True}, "b": {"required": False}, "c": {}}, "required": ["c"]},
            {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["c", "a"]},
            ["required"],
        ),
        (
            {"properties": {"a": {"required": True, "properties": {"b": {"required": True}}}}},
            {"properties": {"a": {"properties": {"b": {}}, "required": ["b"]}}, "required": ["a"]},
            ["required"],
        ),
        ({"required": ["a", "b", "a"]}, {"required": ["a", "b"]}, ["required"]),
        ({"type": "OBJECT"}, {"type": "object"}, ["type"]),
        ({"type": ["String", "NULL"]}, {"type": ["string", "null"]}, ["type"]),
        ({"type": "dict"}, {"type": "object"}, ["type"]),
        ({"type": "any"}, {}, ["type"]),
        ({"$schema": None, "type": "null"}, {"type": "null"}, ["$schema"]),
        ({"type": "string", "nullable": True}, {"type": "string", "nullable": True}, ["nullable"]),
        ({"type": "string", "nullable": False}, {"type": "string", "nullable": False}, []),
        (
            {"$ref": "#/definitions/a", "definitions": {"a": {"items": [{"type": "INTEGER"}]}}},
            {"$ref": "#/definitions/a", "definitions": {"a": {"prefixItems": [{"type": "integer"}]}}},
            ["items", "type"],
        ),
        (
            {
                "not": {"$ref": "#/components/a"},
                "components": {"a": {"minimum": 3, "exclusiveMinimum": True}},
            },
            {"not": {"$ref": "#/components/a"}, "components": {"a": {"exclusiveMinimum": 3}}},
            ["exclusiveMinimum"],
        ),
        # Values and names that look like keywords.
        (
            {"enum": [{"items": [1], "required": None}], "properties": {"items": {}, "required": True}},
            {"enum": [{"items": [1], "required": None}], "properties": {"items": {}, "required": True}},
            [],
        ),
    ],
)
def test_read(before: dict[str, Any], after: dict[str, Any], slips: list[str]) -> None:
    found: set[str] = set()
    assert to_newest(before, param="schema", slips=found) == after
    assert sorted(found) == slips
    assert list(plan_enforcement(before, strict=False, param="schema", limits=LIMITS).slips) == slips


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"exclusiveMinimum": True}}}, "/properties/a/exclusiveMinimum"),
        ({"exclusiveMaximum": True, "minimum": 1}, "/exclusiveMaximum"),
        ({"exclusiveMaximum": True, "maximum": None}, "/exclusiveMaximum"),
        ({"$schema": NEWEST, "exclusiveMaximum": True}, "/exclusiveMaximum"),
        ({"prefixItems": [{}], "items": [{}]}, "/items"),
        ({"required": True}, "/required"),
        ({"items": {"type": None}}, "/items/type"),
        ({"type": "file"}, "/type"),
        ({"type": ["string", "date"]}, "/type"),
        ({"additionalProperties": "false"}, "/additionalProperties"),
        ({"minimum": "1"}, "/minimum"),
    ],
)
def test_refused_with_what_to_declare(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid, match="declare \\$schema") as caught:
        plan_enforcement(schema, strict=False, param="schema", limits=LIMITS)
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "draft", [NEWEST, "https://json-schema.org/schema", "http://json-schema.org/draft-07/schema#"]
)
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": None},
        {"type": "OBJECT"},
        {"properties": {"a": {"required": True}}},
    ],
)
def test_a_declared_draft_is_read_as_it_says(draft: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarInvalid, match="not a JSON schema"):
        plan_enforcement({"$schema": draft, **schema}, strict=False, param="schema", limits=LIMITS)


def tool(name: str, schema: Any, *, strict: bool = False) -> Tool:
    return Tool(name, "", schema, strict, f"tools[0].function.parameters of {name}")


def test_an_output_names_what_was_read_in_any_of_its_schemas() -> None:
    tools = (
        tool("a", {"type": "DICT", "properties": {"x": {"items": [{}]}}}),
        tool("b", {"type": "object", "properties": {"x": {"type": "string", "nullable": True}}}),
    )
    plan = plan_output(OutputConstraints(tools=tools, tool_choice="auto"), ToolStyle.GENERIC, limits=LIMITS)
    assert plan.described_enforcement == 'full; read="items type"; annotation="nullable"'
    with_format = OutputConstraints(
        format=JsonSchema({"uniqueItems": True, "properties": None}, False, "schema")
    )
    validated = plan_output(with_format, ToolStyle.GENERIC, limits=LIMITS)
    assert validated.described_enforcement == 'validated; read="properties"'
    nullable = OutputConstraints(format=JsonSchema({"nullable": True}, False, "schema"))
    assert (
        plan_output(nullable, ToolStyle.GENERIC, limits=LIMITS).described_enforcement
        == 'full; annotation="nullable"'
    )
    assert plan_output(OutputConstraints(), ToolStyle.GENERIC, limits=LIMITS).described_enforcement is None


@pytest.mark.parametrize(
    ("schema", "strict", "error", "reason"),
    [
        (
            {"type": "object", "properties": {"a": {"exclusiveMinimum": True}}},
            False,
            GrammarInvalid,
            "declare",
        ),
        (
            {"type": "object", "properties": {"a": {"uniqueItems": True}}},
            True,
            SchemaNotEnforceable,
            "uniqueItems",
        ),
        ({"type": "array"}, False, GrammarRefused, 'needs "type": "object"'),
    ],
)
def test_a_refusal_names_the_tool(
    schema: Any, strict: bool, error: type[GrammarRefused], reason: str
) -> None:
    tools = (tool("fine", {"type": "object"}), tool("get_weather", schema, strict=strict))
    with pytest.raises(GrammarRefused, match="tool 'get_weather'") as caught:
        plan_output(OutputConstraints(tools=tools, tool_choice="auto"), ToolStyle.GENERIC, limits=LIMITS)
    assert type(caught.value) is error and reason in str(caught.value)
    assert caught.value.param == tools[1].param
