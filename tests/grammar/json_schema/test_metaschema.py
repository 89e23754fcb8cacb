"""What is no schema is named by its place, and asking costs no more than the schema is long."""

import time
from typing import Any

import pytest

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.metaschema import check_is_schema, check_references
from loraplex.grammar.json_schema.references import References


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"items": {"type": "strin"}}, "/items/type"),
        ({"pattern": "("}, "/pattern"),
        ({"patternProperties": {"[z-a]": {}}}, "/patternProperties"),
        ({"required": ["a", "a"]}, "/required"),
        ({"$defs": {"a": {"allOf": [{"minLength": -1}]}}}, "/$defs/a/allOf/0/minLength"),
        ({"$id": "http://["}, "/$id"),
        ({"items": {"additionalItems": {"items": {"type": 7}}}}, "/items/additionalItems/items/type"),
    ],
)
def test_no_schema(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        check_is_schema(schema, param="response_format.json_schema.schema")
    assert caught.value.pointer == pointer
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_message_does_not_repeat_the_whole_schema() -> None:
    with pytest.raises(GrammarInvalid) as caught:
        check_is_schema({"type": "x" * 100_000}, param="s")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "schema", [True, {}, {"pattern": "^.{1,2048}$"}, {"$schema": "http://127.0.0.1:9/x"}]
)
def test_a_schema(schema: Any) -> None:
    check_is_schema(schema, param="s")


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1:9/x", "https://example.com/x#/a", "file:///etc/passwd", "x"]
)
def test_a_reference_out_of_the_schema(uri: str) -> None:
    with pytest.raises(GrammarInvalid, match="nothing outside") as caught:
        check_references(References({"$defs": {"a": {"items": {"$ref": uri}}}}), param="s")
    assert caught.value.pointer == "/$defs/a/items/$ref"


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"not": {"$ref": "#/none"}}, "/not/$ref"),
        ({"$dynamicRef": "#none"}, "/$dynamicRef"),
        ({"$dynamicRef": "http://e.test/x"}, "/$dynamicRef"),
        ({"$ref": "http://json-schema.org/draft-07/schema#"}, "/$ref"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema#/none"}, "/$ref"),
        ({"$dynamicRef": "https://json-schema.org/draft/2020-12/schema#meta"}, "/$dynamicRef"),
        ({"items": {"$ref": "#/x/y"}, "x": {"y": {"$ref": "elsewhere"}}}, "/x/y/$ref"),
        # The validator's registry finds no base for the inner identifier.
        ({"$id": "mailto:x", "$defs": {"a": {"$id": "b"}}}, ""),
    ],
)
def test_references_that_the_validator_would_not_find(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        check_references(References(schema), param="s")
    assert (caught.value.param, caught.value.pointer) == ("s", pointer)


def test_references_inside_and_to_the_standard_stay() -> None:
    schema = {
        "$id": "https://example.com/a",
        "$defs": {"b": {"$id": "b"}, "c": {"$ref": "b"}, "d": {"$ref": "#/$defs/c"}},
        "items": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    }
    check_references(References(schema), param="s")


def test_definitions_that_refer_to_each_other_and_great_patterns_cost_little() -> None:
    names = [f"d{number}" for number in range(40)]
    everything = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in names], "unevaluatedProperties": False}
    patterns = [{"pattern": f"^.{{1,900}}{number}$"} for number in range(400)]
    schema: Any = {"$defs": dict.fromkeys(names, everything), "prefixItems": patterns}
    started = time.process_time()
    check_is_schema(schema, param="s")
    assert time.process_time() - started < 5


def test_an_unused_definition_may_refer_to_nothing() -> None:
    check_references(References({"$defs": {"a": {"$ref": "#/none"}}}), param="s")


def test_many_references_to_the_whole_cost_little() -> None:
    names = {f"d{number}": {"items": {"$ref": "#"}, "enum": [number]} for number in range(2_000)}
    schema: Any = {"$defs": names, "allOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    started = time.process_time()
    check_references(References(schema), param="s")
    assert time.process_time() - started < 5
