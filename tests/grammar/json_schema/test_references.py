"""References are found inside the schema and nowhere else."""

from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.cycles import recursive_groups
from loraplex.grammar.json_schema.references import ROOT, References

SCHEMA = {
    "$id": "http://example.com/root.json",
    "$defs": {
        "a/b~c %": {"$anchor": "x", "type": "null"},
        "inner": {
            "$id": "inner/",
            "$defs": {"y": {"$anchor": "x", "type": "string"}, "z": {"$dynamicAnchor": "dyn"}},
        },
        "urn": {"$id": "urn:uuid:deadbeef", "$defs": {"w": {"type": "array"}}},
    },
    "enum": [{"$id": "http://example.com/fake", "$anchor": "fake"}],
    "x-own": {"deep": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("reference", "base", "pointer"),
    [
        ("#", "http://example.com/root.json", ""),
        ("root.json", "http://example.com/root.json", ""),
        ("#/$defs/a~1b~0c%20%25", "http://example.com/root.json", "/$defs/a~1b~0c %"),
        ("#x", "http://example.com/root.json", "/$defs/a~1b~0c %"),
        ("inner/#x", "http://example.com/root.json", "/$defs/inner/$defs/y"),
        ("#x", "http://example.com/inner/", "/$defs/inner/$defs/y"),
        ("#dyn", "http://example.com/inner/", "/$defs/inner/$defs/z"),
        ("#/$defs/w", "urn:uuid:deadbeef", "/$defs/urn/$defs/w"),
        ("#/x-own/deep", "http://example.com/root.json", "/x-own/deep"),
        ("http://example.com/other.json", "http://example.com/root.json", None),
        ("http://example.com/fake", "http://example.com/root.json", None),
        ("#fake", "http://example.com/root.json", None),
        ("#/$defs/none", "http://example.com/root.json", None),
        ("#/enum/7", "http://example.com/root.json", None),
        ("#/enum", "http://example.com/root.json", None),
        ("file:///etc/passwd", "http://example.com/root.json", None),
    ],
)
def test_resolved(reference: str, base: str, pointer: str | None) -> None:
    found = References(SCHEMA).resolve(reference, base)
    assert (None if found is None else found.pointer) == pointer


def test_what_is_referred_to_has_its_own_base() -> None:
    found = References(SCHEMA).resolve("#/$defs/inner/$defs/y", "http://example.com/root.json")
    assert found is not None and found.base == "http://example.com/inner/"


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1/x", "file:///etc/passwd", "#/$defs/none", "#none"])
def test_nothing_outside_is_fetched(reference: str) -> None:
    with pytest.raises(GrammarInvalid):
        plan_enforcement({"items": {"$ref": reference}}, strict=False, param="schema", limits=SchemaLimits())


def test_the_standards_own_schema_is_validated() -> None:
    schema = {"$ref": "https://json-schema.org/draft/2020-12/schema"}
    plan = plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())
    assert plan.enforcement == "validated" and plan.schema == {}


def test_cycles() -> None:
    schema: dict[str, Any] = {
        "properties": {"child": {"$ref": "#/$defs/a"}},
        "$defs": {
            "a": {"items": {"$ref": "#/$defs/b"}},
            "b": {"items": {"$ref": "#/$defs/a"}, "prefixItems": [{"$ref": "#/$defs/c"}]},
            "c": {"type": "null"},
            "self": {"items": {"$ref": "#/$defs/self"}},
        },
        "items": {"$ref": "#/$defs/self"},
    }
    groups = recursive_groups(References(schema))
    assert groups["/$defs/a"] == groups["/$defs/b"]
    assert len({groups[""], groups["/$defs/a"], groups["/$defs/c"], groups["/$defs/self"]}) == 4


def test_a_long_chain_of_references_exhausts_no_stack() -> None:
    chain = {f"d{index}": {"items": {"$ref": f"#/$defs/d{index + 1}"}} for index in range(1_500)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": {"type": "null"}}}
    plan = plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits())
    assert plan.enforcement == "full"


@pytest.mark.parametrize(
    "reference",
    [
        "#/allOf/%C2%B2",  # a digit that `int` does not read
        "#/allOf/" + "1" * 5_000,
        "#/allOf/-",
        "#/allOf/%FF",
        "#%61",
        "?",
        "//",
        "http://[",
        "twice",
        "#two",
    ],
)
def test_no_single_target(reference: str) -> None:
    twice = {"$id": "twice", "$anchor": "a"}
    schema = {
        "allOf": [True, {"$anchor": "two"}, {"$dynamicAnchor": "two"}],
        "$defs": {"a": twice, "b": twice},
    }
    found = References(schema)
    assert found.resolve(reference, ROOT) is None
    assert found.resolve("#/allOf/0", ROOT) is not None


def test_a_name_of_both_kinds_and_an_empty_identifier_are_no_second_name() -> None:
    schema = {"$defs": {"a": {"$anchor": "x", "$dynamicAnchor": "x"}, "b": {"$id": "#"}, "c": {"$id": ""}}}
    found = References(schema)
    assert found.resolve("#x", ROOT) is not None and found.resolve("#", ROOT) == found.at_root()


def test_a_dynamic_reference_may_lead_to_each_anchor_of_its_name() -> None:
    schema = {
        "$dynamicRef": "#a",
        "$defs": {
            "here": {"$dynamicAnchor": "a"},
            "inner": {"$id": "inner", "$dynamicAnchor": "a", "items": {"$ref": "#/none"}},
            "other": {"$dynamicAnchor": "b", "items": {"$ref": "#/none"}},
        },
    }
    places = [each.place.pointer for each in References(schema).followed]
    assert places == ["", "/$defs/inner/items"]


def test_what_only_references_make_a_subschema() -> None:
    schema: Any = {
        "items": {"$dynamicRef": "#/x-own/a~1b/0"},
        "x-own": {"a/b": [{"not": {"$ref": "#/enum/0"}, "$anchor": "nameless"}]},
        "enum": [{"$ref": "#/items"}, {"$ref": "#/x-own/unreached"}],
        "$defs": {"unused": {"$ref": "#/x-own/unused"}},
    }
    found = References(schema)
    assert {place.pointer for place in found.outside()} == {"/x-own/a~1b/0", "/enum/0"}
    assert found.resolve("#nameless", ROOT) is None
    assert {(each.place.pointer, each.keyword) for each in found.followed} == {
        ("/items", "$dynamicRef"),
        ("/x-own/a~1b/0/not", "$ref"),
        ("/enum/0", "$ref"),
    }


@pytest.mark.parametrize("value", [None, 5, "a", [5], {"a": 5}, {"$id": 5, "$ref": 5, "$anchor": []}])
def test_any_json_is_indexed(value: Any) -> None:
    schema = {
        keyword: value for keyword in ("$id", "$anchor", "$dynamicAnchor", "$ref", "allOf", "properties", "x")
    }
    assert References({**schema, "not": {"$ref": "#/x"}}).followed
