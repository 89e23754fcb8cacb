"""A relaxed schema lets every valid document through, keeps what can be kept, and never narrows below a negation."""

import json
import random
from typing import Any

import pytest
from tests.grammar.grammar_walks import Walks
from tests.grammar.random_schemas import random_schema

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, SchemaNotEnforceable, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


def plan_for(schema: Any) -> EnforcementPlan:
    return plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())


@pytest.mark.parametrize(
    ("schema", "relaxed", "pointers"),
    [
        (
            {"type": "array", "uniqueItems": True, "maxItems": 3},
            {"type": "array", "maxItems": 3},
            ["/uniqueItems"],
        ),
        ({"not": {"type": "object", "uniqueItems": True}}, {}, ["/not"]),
        ({"if": {"uniqueItems": True}, "then": {"minItems": 1}}, {}, ["/if"]),
        (
            {"if": {"const": 1}, "then": {"maximum": 2}, "else": {"type": "string", "not": {"const": 1}}},
            {"anyOf": [{"maximum": 2}, {"type": "string"}]},
            ["/if", "/else/not"],
        ),
        (
            {"oneOf": [{"minimum": 1}, {"maximum": 5}], "type": "integer"},
            {"type": "integer", "anyOf": [{"minimum": 1}, {"maximum": 5}]},
            ["/oneOf"],
        ),
        ({"const": 9007199254740993}, {"type": "number"}, ["/const"]),
        (
            {"enum": ["\u0001", 1, 2**60]},
            {"anyOf": [{"enum": ["\u0001", 1]}, {"type": ["number"]}]},
            ["/enum"],
        ),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 0, "maximum": 0.5}, ["/exclusiveMinimum"]),
        (
            {
                "patternProperties": {"a": {}, "b": {"type": "null"}},
                "additionalProperties": False,
                "required": ["a"],
            },
            {"required": ["a"]},
            ["/patternProperties"],
        ),
        ({"contains": {"const": 1}, "minContains": 2, "items": {}}, {"items": {}}, ["/contains"]),
        (
            {"properties": {"a": {"dependentRequired": {"b": ["c"]}}}},
            {"properties": {"a": {}}},
            ["/properties/a/dependentRequired"],
        ),
        ({"pattern": "(?=a)", "minLength": 1}, {"minLength": 1}, ["/pattern"]),
        ({"pattern": "^2", "format": "date"}, {"pattern": "^2"}, ["/format"]),
        (
            {"type": "string", "pattern": "^2", "format": "date", "maxLength": 10},
            {"type": "string", "pattern": "^2", "maxLength": 10},
            ["/format"],
        ),
        ({"propertyNames": {"pattern": "(?=a)"}, "required": ["a"]}, {"required": ["a"]}, ["/propertyNames"]),
    ],
)
def test_relaxed(schema: Any, relaxed: Any, pointers: list[str]) -> None:
    plan = plan_for(schema)
    assert plan.enforcement == "validated" and plan.validation_schema == schema
    assert plan.schema == relaxed
    assert [each.pointer for each in plan.unenforced] == pointers
    with pytest.raises(SchemaNotEnforceable) as caught:
        plan_enforcement(schema, strict=True, param="tools[2]", limits=SchemaLimits())
    assert (caught.value.param, caught.value.pointer) == ("tools[2]", pointers[0])


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"uniqueItems": False}, {}),
        ({"uniqueItems": True, "maxItems": 1}, {"maxItems": 1}),
        ({"minLength": 2.0}, {"minLength": 2}),
        ({"contains": True}, {"minItems": 1}),
        ({"contains": {"const": 1}, "minContains": 0}, {}),
        ({"not": False}, {}),
        ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": "string"}),
        (
            {"properties": {"a": {}}, "unevaluatedProperties": False},
            {"properties": {"a": {}}, "additionalProperties": False},
        ),
        ({"prefixItems": [{}], "unevaluatedItems": False}, {"prefixItems": [{}], "items": False}),
        (
            {"propertyNames": {"pattern": "^a"}},
            {"patternProperties": {"^a": {}}, "additionalProperties": False},
        ),
        ({"oneOf": [{"type": "null"}, {"const": "a"}]}, {"anyOf": [{"type": "null"}, {"const": "a"}]}),
        ({"oneOf": [{"minimum": 2}]}, {"minimum": 2}),
        ({"allOf": [{"type": "null"}], "title": "x", "x-own": 1}, {"type": "null"}),
        ({"type": "string", "x-guidance": {"lenient": True}, "nullable": True}, {"type": "string"}),
        (
            {"$id": "http://a/", "$ref": "#b", "$defs": {"c": {"$anchor": "b"}}},
            {"$ref": "#/$defs/d0", "$defs": {"d0": {}}},
        ),
    ],
)
def test_rewritten_without_a_change_of_meaning(schema: Any, rewritten: Any) -> None:
    plan = plan_for(schema)
    assert plan.enforcement == "full" and plan.validation_schema is None and plan.unenforced == ()
    assert plan.schema == rewritten


def test_recursion_beside_other_keywords_is_cut_not_followed(walks: Walks) -> None:
    schema = {
        "type": "object",
        "properties": {"child": {"$ref": "#", "required": ["name"]}, "name": {"type": "string"}},
        "additionalProperties": False,
    }
    plan = plan_for(schema)
    assert [each.pointer for each in plan.unenforced] == ["/properties/child/$ref"]
    start = walks.start(plan.schema, "llguidance")
    assert walks.accepts(start, '{"child":{"name":"a"},"name":"b"}')
    assert not walks.accepts(start, '{"child":{},"name":"b"}')


def test_a_declared_order_is_the_requests(walks: Walks) -> None:
    first = plan_for({"allOf": [{"properties": {"a": {}}}, {}], "properties": {"b": {}}})
    start = walks.start(first.schema, "llguidance")
    assert walks.accepts(start, '{"a":1,"b":2}') and not walks.accepts(start, '{"b":2,"a":1}')
    second = plan_for({"properties": {"b": {}}, "allOf": [{"properties": {"a": {}}}, {}]})
    start = walks.start(second.schema, "llguidance")
    assert walks.accepts(start, '{"b":2,"a":1}') and not walks.accepts(start, '{"a":1,"b":2}')


def test_scalars_and_small_arrays_that_are_valid_are_let_through_whatever_the_schema(walks: Walks) -> None:
    """Objects have an order; of these each value has one spelling, so that a refused one shows a relaxation that narrows."""
    values = [
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "2",
        "1.5",
        "100",
        '""',
        '"a"',
        '"b"',
        '"foo"',
        "[]",
        "{}",
    ]
    values += ["[1]", "[null]", '["a"]', "[1,2]", '{"a":1}', '{"b":2}', '{"foo":"a"}', "[[1]]", '[{"a":1}]']
    tried = 0
    for seed in range(700):
        schema = random_schema(random.Random(seed))
        if '"$ref"' in json.dumps(schema):
            # A loop of references says nothing; the validator reads it as true.
            continue
        try:
            plan = plan_for(schema)
            validator = Validator(schema)
            start = walks.start(plan.schema, "llguidance")
        except (GrammarRefused, GrammarInvalid):
            assert not any(_is_valid(schema, value) for value in values), json.dumps(schema)
            continue
        for value in values:
            if _satisfies(validator, value):
                tried += 1
                assert walks.accepts(start, value), f"{value} under {json.dumps(schema)}"
    assert tried > 500


def _is_valid(schema: Any, value: str) -> bool:
    try:
        return _satisfies(Validator(schema), value)
    except GrammarInvalid:
        return False


def _satisfies(validator: Validator, value: str) -> bool:
    try:
        validator.validate(value)
    except SchemaNotSatisfied:
        return False
    return True
