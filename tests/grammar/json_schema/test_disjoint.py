"""A proof that options exclude each other is right, and the usual unions of clients are proven."""

import random
from typing import Any

import pytest
from tests.grammar.random_schemas import random_schema

from loraplex.grammar.errors import GrammarInvalid, SchemaNotSatisfied
from loraplex.grammar.json_schema.disjoint import Disjointness
from loraplex.grammar.json_schema.references import References
from loraplex.grammar.json_schema.validator import Validator


def disjoint(options: list[Any], **definitions: Any) -> bool:
    references = References({"oneOf": options, "$defs": definitions})
    root = references.at_root()
    places = [references.child(root, f"/oneOf/{index}", option) for index, option in enumerate(options)]
    return Disjointness(references).all_disjoint(places)


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "hound"]}}, "required": ["kind"]}


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": ["null", "array"]}],
        [{"const": 1}, {"const": 2}, {"enum": [True, "1"]}],
        [CAT, DOG],
        [{"$ref": "#/$defs/cat"}, {"allOf": [{"$ref": "#/$defs/dog"}, {"minProperties": 1}]}],
        [{"type": "number", "maximum": 1}, {"type": "number", "exclusiveMinimum": 1}],
        [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}],
        [{"type": "array", "maxItems": 0}, {"type": "array", "minItems": 1}],
        [CAT, {"type": "object", "properties": {"a": {}}, "additionalProperties": False}],
        [{"anyOf": [{"const": 1}, {"const": 2}]}, {"oneOf": [{"const": 3}, {"type": "null"}]}],
        [{"type": "integer"}, {"const": 1.5}],
        [False, {}],
        [{"type": "object", "properties": {"t": {"const": n}}, "required": ["t"]} for n in range(300)],
    ],
)
def test_proven(options: list[Any]) -> None:
    assert disjoint(options, cat=CAT, dog=DOG)


@pytest.mark.parametrize(
    "options",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": "cat"}, {}],
        [CAT, {**DOG, "required": []} | {"properties": {}}],
        [{"minimum": 2}, {"maximum": 1}],
        [{"type": "number", "maximum": 1}, {"type": "number", "minimum": 1}],
        [{"properties": {"k": {"const": 1}}, "required": ["k"]}, {"properties": {"k": {"const": 2}}}],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],
        [{"minimum": number} for number in range(400)],
        [{"$ref": "#/$defs/loop"}, {"type": "string"}],
    ],
)
def test_not_proven(options: list[Any]) -> None:
    assert not disjoint(options, loop={"$ref": "#/$defs/loop"})


def test_what_is_proven_is_true_of_random_schemas() -> None:
    values = ['""', '"a"', '"b"', "0", "1", "2", "1.5", "-1", "100", "true", "null", "[]", "[1]", "{}"]
    values += ['{"a":1}', '{"b":2}', '{"foo":"a"}', '{"a":1,"b":null}', '["a"]', "[null,1]"]
    proven = 0
    for seed in range(600):
        source = random.Random(seed)
        first, second = random_schema(source), random_schema(source)
        definitions = first.pop("$defs")
        del second["$defs"]
        if not disjoint([first, second], **definitions):
            continue
        proven += 1
        try:
            both = Validator(
                {"oneOf": [], "allOf": [first, second], "$defs": definitions} | {"oneOf": [True]}
            )
        except GrammarInvalid:
            continue
        for value in values:
            with pytest.raises(SchemaNotSatisfied):
                both.validate(value)
    assert proven > 50
