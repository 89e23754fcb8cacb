"""Schemas without a document are refused, empty parts are never entered, and all others stay."""

from typing import Any

import pytest
from tests.grammar.grammar_walks import Walks

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.satisfiable import possible_types, types_of_definitions, without_empty_parts

LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": LOOP},
        {"$ref": "#/$defs/n", "$defs": {"n": ENDLESS}},
        {"type": "object", "required": ["x"], "additionalProperties": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        {"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#"}]},
        {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "string", "minLength": 2, "maxLength": 1}]},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "object", "minProperties": 2, "maxProperties": 1},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "object", "minProperties": 1, "additionalProperties": False},
        {"type": "string", "enum": [1, 2]},
        {"type": "string", "allOf": [{"type": "integer"}]},
        {"enum": []},
        {"not": {}},
        {"type": "null", "not": {"type": ["null", "object"]}},
    ],
)
def test_no_document(schema: Any) -> None:
    with pytest.raises(GrammarInvalid, match="no document satisfies"):
        plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"properties": {"next": {"$ref": "#"}}}, '{"next":{"next":{}}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": ENDLESS}}, "null"),
        ({"type": "object", "properties": {"a": False}, "required": []}, '{"b":1}'),
        ({"minLength": 2, "maxLength": 1}, "3"),
        ({"type": "array", "prefixItems": [{"const": 1}, {"$ref": "#"}], "items": False}, "[1]"),
        (
            {
                "type": "object",
                "required": ["x"],
                "patternProperties": {"x": {}},
                "additionalProperties": False,
            },
            '{"x":1}',
        ),
    ],
)
def test_documents_without_the_empty_parts(schema: Any, document: str) -> None:
    plan = plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits())
    walks = Walks(byte_vocabulary())
    start = walks.start(plan.schema, "llguidance")
    assert walks.accepts(start, document)
    assert list(walks.texts(start, 5, 1))


def test_an_empty_part_becomes_false() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {}}, "$defs": {"n": {**ENDLESS}}}
    known = types_of_definitions(schema)
    assert known == {"#/$defs/n": frozenset()}
    assert without_empty_parts(schema, known)["properties"] == {"a": False, "b": {}}


def test_types_of_a_recursive_union_grow_until_nothing_is_new() -> None:
    schema = {
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
            "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]},
        }
    }
    known = types_of_definitions(schema)
    assert set(known.values()) == {frozenset({"null", "string"})}
    assert possible_types({"$ref": "#/$defs/a", "type": "integer"}, known) == frozenset()
