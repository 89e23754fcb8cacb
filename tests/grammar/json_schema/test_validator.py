"""The validator reads numbers exactly, opens no connection, quotes no values and is bounded."""

import json
import time
from typing import Any

import pytest

from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.grammar.json_schema.validator import Validator, parse_value


@pytest.mark.parametrize(
    ("schema", "text", "message"),
    [
        ({"properties": {"a": {"items": {"type": "null"}}}}, '{"a":[null,"secret"]}', "type .* at '/a/1'"),
        ({"uniqueItems": True}, "[1,1.0]", "uniqueItems"),
        ({"const": 10**30}, str(10**30 + 1), "const"),
        ({"multipleOf": 0.01}, "0.001", "multipleOf"),
        ({"maximum": 9007199254740992}, "9007199254740993", "maximum"),
        ({"type": "object"}, '{"a":1,"a":1}', "a key twice"),
        ({}, "[" * 100_000, "nested too deeply"),
        ({}, '{"a":' * 5_000 + "1" + "}" * 5_000, "nested too deeply"),
        ({}, "NaN", "NaN is not JSON"),
        ({}, '{"a":1', "not JSON"),
        ({}, "1 2", "not JSON"),
        ({}, "", "not JSON"),
        ({}, "1" * 5_000, "digits"),
        ({}, "1e999", "1e±400"),
        ({}, "1e" + "9" * 30, "1e±400"),
        ({"type": "string"}, '"\\ud800"', "cannot be validated"),
        ({"format": "date"}, '"2023-02-29"', "format"),
    ],
)
def test_not_satisfied(schema: Any, text: str, message: str) -> None:
    with pytest.raises(SchemaNotSatisfied, match=message) as caught:
        Validator(schema).validate(text)
    assert "secret" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": [1]}, "1.0"),
        ({"const": 10**30}, str(10**30)),
        ({"multipleOf": 0.1}, "0.3"),
        ({"type": "integer"}, "1e2"),
        ({"minimum": 0}, "1e-300"),
        ({"format": "color"}, '"x"'),
        (True, "null"),
    ],
)
def test_satisfied(schema: Any, text: str) -> None:
    Validator(schema).validate(text)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"items": {"type": "strin"}}, "/items/type"),
        ({"pattern": "("}, "/pattern"),
        ({"required": ["a", "a"]}, "/required"),
        ({"minLength": -1}, "/minLength"),
    ],
)
def test_no_schema(schema: Any, pointer: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        Validator(schema, param="response_format.json_schema.schema")
    assert caught.value.pointer == pointer
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9/x", "https://example.com/x", "file:///etc/passwd"])
def test_offline(uri: str) -> None:
    with pytest.raises(GrammarInvalid):
        Validator({"$ref": uri})


def test_backtracking_is_bounded() -> None:
    validator = Validator({"pattern": r"^(x+x+)+y(?!z)(a|aa)+$"})
    started = time.process_time()
    with pytest.raises(SchemaNotSatisfied):
        validator.validate(json.dumps("x" * 20_000))
    assert time.process_time() - started < 20


def test_numbers_are_exact() -> None:
    found = parse_value("[12345678901234567890123, 0.10000000000000000001]")
    assert [str(number) for number in found] == ["12345678901234567890123", "0.10000000000000000001"]
