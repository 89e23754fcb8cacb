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
        (DRAFT_7, {"not": {"$id": "#a"}}, {"not": {"$anchor": "a"}}),
        (DRAFT_7, {"not": {"$id": "#/not"}}, {"not": {}}),
        (DRAFT_7, {"not": {"$id": "http://a/b#"}}, {"not": {"$id": "http://a/b"}}),
        (DRAFT_7, {"not": {"$id": "http://a/b#c"}}, None),
        (DRAFT_7, {"$id": "http://a/b#c"}, {"$id": "http://a/b", "$anchor": "c"}),
        (DRAFT_4, {"not": {"id": "#a"}}, {"not": {"$anchor": "a"}}),
        (DRAFT_2019, {"not": {"$id": "#a"}}, None),
        (NEWEST, {"not": {"$id": "#a"}, "$id": "#"}, {"not": {"$id": "#a"}}),
        # Keywords that a draft does not know.
        (DRAFT_4, {"minimum": 1, "exclusiveMinimum": 5}, None),
        (DRAFT_4, {"const": 1, "contains": False, "propertyNames": False}, {}),
        (DRAFT_6, {"contains": True, "minContains": 0}, {"contains": True}),
        (DRAFT_7, {"not": {"unevaluatedProperties": False, "dependentRequired": {"a": []}}}, {"not": {}}),
        (DRAFT_2019, {"prefixItems": [True], "items": False}, {"items": False}),
        # A subschema with an identifier may have a draft of its own.
        (
            NEWEST,
            {"not": {"$id": "a", "$schema": DRAFT_7, "items": [True]}},
            {"not": {"$id": "a", "$schema": NEWEST, "prefixItems": [True]}},
        ),
        (
            NEWEST,
            {"not": {"$schema": DRAFT_7, "items": [True]}},
            {"not": {"$schema": NEWEST, "items": [True]}},
        ),
        (
            DRAFT_2019,
            {
                "dependencies": {"a": ["b", "c"], "d": {}},
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"d": False},
            },
            {"dependentRequired": {"a": ["b", "c"]}, "dependentSchemas": {"d": {"allOf": [False, {}]}}},
        ),
        (DRAFT_7, {"dependencies": {"a": 5}}, {"dependentRequired": {"a": 5}}),
        (DRAFT_2019, {"dependencies": {"a": ["b"]}, "dependentRequired": 5}, {"dependentRequired": 5}),
        # What only references make a subschema.
        (
            DRAFT_7,
            {"not": {"$ref": "#/x/a~1b/0"}, "x": {"a/b": [{"items": [], "y": {"items": []}}], "items": []}},
            {
                "not": {"$ref": "#/x/a~1b/0"},
                "x": {"a/b": [{"prefixItems": [], "y": {"items": []}}], "items": []},
            },
        ),
        (
            DRAFT_4,
            {
                "not": {"$ref": "#/x"},
                "x": {"allOf": [{"$ref": "#/y"}], "y": {"id": "#"}},
                "y": {"minimum": 1, "exclusiveMinimum": True},
            },
            {
                "not": {"$ref": "#/x"},
                "x": {"allOf": [{"$ref": "#/y"}], "y": {"id": "#"}},
                "y": {"exclusiveMinimum": 1},
            },
        ),
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
        ({"$schema": DRAFT_2019, "items": {"$recursiveRef": "#a"}}, "/items/$recursiveRef"),
        ({"$schema": DRAFT_2019, "$recursiveRef": "#", "$ref": "#/$defs/a"}, "/$recursiveRef"),
        ({"not": {"$ref": "#/x"}, "x": {"items": {"extends": {}}}}, "/x/items/extends"),
        # A value that is compared must stay as it is.
        ({"$schema": DRAFT_7, "not": {"$ref": "#/const"}, "const": {"items": [True]}}, "/const"),
        (
            {
                "$schema": DRAFT_7,
                "not": {"$ref": "#/properties"},
                "properties": {"if": 5, "const": {}, "minContains": {}},
            },
            "/properties",
        ),
    ],
)
def test_unknown(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        to_newest(schema, param="schema")
    assert caught.value.pointer == pointer


@pytest.mark.parametrize(
    "named",
    [
        "https://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-07/schema#/",
        "http://json-schema.org/draft/2020-12/schema#",
        "http://json-schema.org/schema#",
    ],
)
def test_spellings_of_a_dialect(named: str) -> None:
    assert to_newest({"$schema": named, "type": "null"}, param="schema") == {
        "$schema": NEWEST,
        "type": "null",
    }


def test_without_a_dialect_an_identifier_may_have_a_fragment() -> None:
    assert to_newest({"$id": "http://a/#b", "not": {"$id": "#c"}}, param="schema") == {
        "$id": "http://a/",
        "$anchor": "b",
        "not": {"$anchor": "c"},
    }
