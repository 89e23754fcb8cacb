"""Older drafts mean under 2020-12 what they meant."""

from typing import Any

import pytest

from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.dialect import NEWEST, to_newest

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"


@pytest.mark.parametrize(
    ("draft", "before", "after"),
    [
        (DRAFT_4, {"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        (DRAFT_4, {"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        (DRAFT_4, {"id": "http://a/", "not": {}}, {"not": {}, "$id": "http://a/"}),
        (DRAFT_6, {"if": False, "then": False, "else": False}, {}),
        (
            DRAFT_7,
            {"items": [{"type": "null"}], "additionalItems": False},
            {"prefixItems": [{"type": "null"}], "items": False},
        ),
        (DRAFT_7, {"items": {}, "additionalItems": False}, {"items": {}}),
        (
            DRAFT_7,
            {"$ref": "#/definitions/a", "minimum": 3, "definitions": {"a": {"items": []}}},
            {"$ref": "#/definitions/a", "definitions": {"a": {"prefixItems": []}}},
        ),
        (
            DRAFT_7,
            {"dependencies": {"a": ["b"], "c": {"items": []}}},
            {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"c": {"prefixItems": []}}},
        ),
        (DRAFT_2019, {"$recursiveRef": "#"}, {"$ref": "#"}),
        (DRAFT_7, {"enum": [{"items": []}], "default": {"items": []}}, None),
    ],
)
def test_rewritten(draft: str, before: dict[str, Any], after: dict[str, Any] | None) -> None:
    assert to_newest({"$schema": draft, **before}, param="schema") == {
        "$schema": NEWEST,
        **(before if after is None else after),
    }


def test_the_newest_stays_as_it_is() -> None:
    schema = {"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": True}}
    assert to_newest(schema, param="schema") is schema
    assert to_newest(True, param="schema") is True


def test_dependencies_are_asserted_in_any_draft() -> None:
    found = to_newest({"dependencies": {"a": ["b"]}}, param="schema")
    assert found == {"dependentRequired": {"a": ["b"]}}
    assert (
        plan_enforcement(found, strict=False, param="s", limits=SchemaLimits()).unenforced[0].keyword
        == "dependentRequired"
    )


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"$schema": "http://example.com/mine"}, "/$schema"),
        ({"$schema": 7}, "/$schema"),
        ({"items": {"$schema": "http://example.com/mine"}}, "/items/$schema"),
        ({"items": {"divisibleBy": 2}}, "/items/divisibleBy"),
        ({"$schema": DRAFT_2019, "$recursiveAnchor": True}, "/$recursiveAnchor"),
    ],
)
def test_unknown(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        to_newest(schema, param="schema")
    assert caught.value.pointer == pointer


def test_array_items_without_a_draft_are_refused_by_place() -> None:
    with pytest.raises(GrammarInvalid) as caught:
        plan_enforcement(
            {"properties": {"a": {"items": [{}]}}}, strict=False, param="s", limits=SchemaLimits()
        )
    assert caught.value.pointer == "/properties/a/items"
