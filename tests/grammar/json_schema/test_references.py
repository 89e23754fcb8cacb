"""References are found inside the schema and nowhere else."""

from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.cycles import recursive_groups
from loraplex.grammar.json_schema.references import References

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
