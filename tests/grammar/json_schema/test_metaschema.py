"""What is no schema is named by its place, and asking costs no more than the schema is long."""

import time
from typing import Any

import pytest

from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.metaschema import check_is_schema, check_stays_inside
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
        check_stays_inside(References({"$defs": {"a": {"items": {"$ref": uri}}}}), param="s")
    assert caught.value.pointer == "/$defs/a/items/$ref"


def test_references_inside_and_to_the_standard_stay() -> None:
    schema = {
        "$id": "https://example.com/a",
        "$defs": {"b": {"$id": "b"}, "c": {"$ref": "b"}, "d": {"$ref": "#/$defs/c"}},
        "items": {"$ref": "https://json-schema.org/draft/2020-12/schema"},
    }
    check_stays_inside(References(schema), param="s")


def test_definitions_that_refer_to_each_other_and_great_patterns_cost_little() -> None:
    names = [f"d{number}" for number in range(40)]
    everything = {"allOf": [{"$ref": f"#/$defs/{name}"} for name in names], "unevaluatedProperties": False}
    patterns = [{"pattern": f"^.{{1,900}}{number}$"} for number in range(400)]
    schema: Any = {"$defs": dict.fromkeys(names, everything), "prefixItems": patterns}
    started = time.process_time()
    check_is_schema(schema, param="s")
    assert time.process_time() - started < 0.5
