"""Every bound names its number and its place, and no depth exhausts the stack."""

from dataclasses import replace
from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.errors import GrammarInvalid, GrammarTooLarge
from loraplex.grammar.json_schema.bounds import check_bounds, check_together

LIMITS = SchemaLimits(
    max_bytes=2_000,
    max_depth=8,
    max_nodes=50,
    max_enum=5,
    max_pattern_bytes=20,
    max_repeat=100,
    max_length=150,
)


def nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "pointer", "number"),
    [
        ({"description": "x" * 3_000}, "", "2000"),
        (nested(8), "/items" * 8, "8"),
        (nested(200_000), "/items" * 8, "8"),
        ({"properties": {str(index): {} for index in range(60)}}, "", "50"),
        ({"items": {"enum": [1, 2, 3, 4, 5, 6]}}, "/items/enum", "5"),
        ({"properties": {"a/b": {"pattern": "x" * 21}}}, "/properties/a~1b/pattern", "20"),
        ({"patternProperties": {"y" * 21: {}}}, "/patternProperties/" + "y" * 21, "20"),
        ({"pattern": "a{101}"}, "/pattern", "100"),
        ({"pattern": "a{1,99999999999}"}, "/pattern", "100"),
        ({"maxItems": 101}, "/maxItems", "100"),
        ({"allOf": [{"minLength": 1e9}]}, "/allOf/0/minLength", "150"),
        ({"maxLength": 151}, "/maxLength", "150"),
    ],
)
def test_too_large(schema: Any, pointer: str, number: str) -> None:
    with pytest.raises(GrammarTooLarge, match=number) as caught:
        check_bounds(schema, limits=LIMITS, param="tools[0]")
    assert (caught.value.param, caught.value.pointer) == ("tools[0]", pointer)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ([], ""),
        ({"minimum": float("nan")}, "/minimum"),
        ({"const": "\ud800"}, "/const"),
        ({"properties": {"\udc00": {}}}, "/properties"),
        ({"const": b"x"}, "/const"),
        ({1: 2}, ""),
    ],
)
def test_not_json(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        check_bounds(schema, limits=LIMITS, param="schema")
    assert caught.value.pointer == pointer


def test_what_only_looks_like_a_bound_is_free() -> None:
    schema = {
        "const": {"maxItems": 10**9, "pattern": "x" * 30},
        "properties": {"maxItems": {"type": "integer"}, "pattern": {}},
        "enum": [1, 2, 3, 4, 5],
        "pattern": "a{100}",
        "maxLength": 150,
    }
    check_bounds(schema, limits=LIMITS, param="schema")
    check_bounds(nested(7), limits=LIMITS, param="schema")
    check_bounds(True, limits=LIMITS, param="schema")


def test_ten_thousand_values_of_an_enum_are_not_nodes() -> None:
    check_bounds({"enum": list(range(10_000))}, limits=SchemaLimits(), param="schema")


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        ([{"prefixItems": [{}] * 60}] * 2, "too many subschemas, at most 100"),
        (
            [{"properties": {"a": {"pattern": "a" * 30}}, "patternProperties": {"b" * 30: {}}}],
            "at most 50 bytes",
        ),
    ],
)
def test_bounds_that_schemas_share(schemas: list[Any], message: str) -> None:
    limits = SchemaLimits(max_nodes_together=100, max_patterns_bytes=50)
    once = [(schemas[0], "tools[0]")]
    check_together(once, limits=replace(limits, max_patterns_bytes=60))
    with pytest.raises(GrammarTooLarge, match=message):
        check_together([(schema, "tools[0]") for schema in schemas], limits=limits)
