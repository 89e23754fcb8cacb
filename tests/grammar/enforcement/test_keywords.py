"""The table of keywords held against the backends: what is granted is enforced, what is denied is a hole or an error there."""

import json
import random
from typing import Any

import pytest
from tests.grammar.enforcement_table import groups
from tests.grammar.grammar_walks import Walks
from tests.grammar.random_schemas import random_schema

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.enforcement_plan import EnforcementPlan
from loraplex.grammar.enforcement.keywords import KEYWORDS
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, SchemaNotSatisfied
from loraplex.grammar.json_schema.formats import FORMATS
from loraplex.grammar.json_schema.validator import Validator
from loraplex.grammar.spec import Backend

CLOSED = {"type": "object", "additionalProperties": False}
A_B = {"a": {"type": "integer"}, "b": {"type": "integer"}}

# Schema, documents it accepts, documents it refuses; both backends where both are granted.
GRANTED: list[tuple[set[Backend], Any, list[str], list[str]]] = [
    ({"llguidance", "xgrammar"}, {"type": "integer"}, ["-1", "0"], ['"1"', "1.5", "null"]),
    ({"llguidance"}, {"type": ["string", "null"]}, ['"a"', "null"], ["1", "{}"]),
    ({"llguidance", "xgrammar"}, {"const": 3}, ["3"], ["4", '"3"']),
    ({"llguidance", "xgrammar"}, {"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2", "true"]),
    ({"llguidance"}, {"const": {"a": [1.5]}}, ['{"a":[1.5]}'], ['{"a":[1]}', "{}"]),
    (
        {"llguidance", "xgrammar"},
        {**CLOSED, "properties": A_B, "required": ["b"]},
        ['{"a":1,"b":2}', '{"b":2}'],
        ["{}", '{"a":1}', '{"b":"2"}', '{"b":2,"c":3}', '{"b":2,"b":"x"}', '{"\\u0061":"x","b":2}'],
    ),
    (
        {"llguidance"},
        {"type": "object", "properties": A_B},
        ["{}", '{"a":1,"c":"x"}'],
        ['{"a":"x"}', '{"\\u0061":"x"}', '{"c":1,"a":"x"}', '{"a":1,"a":"x"}'],
    ),
    ({"llguidance"}, {"required": ["c"]}, ['{"c":1}', "1"], ["{}", '{"d":1}']),
    ({"llguidance"}, {"additionalProperties": {"type": "null"}}, ['{"x":null}', "2"], ['{"x":1}']),
    (
        {"llguidance"},
        {"patternProperties": {"^x": {"type": "null"}, "^y": {"type": "integer"}}},
        ['{"x":null,"y1":2,"z":"z"}'],
        ['{"x1":1}', '{"y":null}'],
    ),
    (
        {"llguidance"},
        {"properties": {"xa": {"type": "integer"}}, "patternProperties": {"^x": {"minimum": 3}}},
        ['{"xa":3,"xb":4}'],
        ['{"xa":2}', '{"xa":"a"}', '{"xb":2}'],
    ),
    ({"llguidance"}, {"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"llguidance"}, {"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    ({"xgrammar"}, {**CLOSED, "properties": A_B, "minProperties": 2}, ['{"a":1,"b":2}'], ["{}", '{"b":1}']),
    ({"xgrammar"}, {**CLOSED, "properties": A_B, "maxProperties": 1}, ["{}", '{"b":1}'], ['{"a":1,"b":2}']),
    (
        {"llguidance", "xgrammar"},
        {"type": "array", "items": {"type": "null"}},
        ["[]", "[null]"],
        ["[1]", "{}"],
    ),
    (
        {"llguidance", "xgrammar"},
        {"type": "array", "minItems": 1, "maxItems": 2},
        ["[1]", '["a",[]]'],
        ["[]", "[1,2,3]"],
    ),
    (
        {"llguidance", "xgrammar"},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}},
        ["[]", "[null,1,2]"],
        ["[1]", "[null,null]"],
    ),
    ({"llguidance", "xgrammar"}, {"type": "array", "prefixItems": [True]}, ["[]", "[1,2]"], ["1", "{}"]),
    ({"llguidance"}, {"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"😀é"'], ['""', '"abc"']),
    ({"llguidance"}, {"type": "string", "pattern": "^a", "maxLength": 2}, ['"ab"'], ['"b"', '"abc"', '"ba"']),
    ({"llguidance"}, {"pattern": "b"}, ['"abc"', "1"], ['"ac"']),
    ({"llguidance"}, {"format": "date"}, ['"2024-02-29"', "1"], ['"2023-02-29"', '"2024-13-01"', '"x"']),
    (
        {"llguidance", "xgrammar"},
        {"type": "integer", "minimum": -3, "maximum": 12},
        ["-3", "0", "9", "10", "12"],
        ["-4", "-10", "13", "20", "120"],
    ),
    ({"llguidance"}, {"minimum": 0.5, "maximum": 10}, ["0.5", "9.99", "10", '"a"'], ["0.49", "10.01", "-1"]),
    ({"llguidance"}, {"exclusiveMinimum": 1, "exclusiveMaximum": 3}, ["1.1", "2"], ["1", "1.0", "3"]),
    (
        {"llguidance"},
        {"type": "object", "propertyNames": False, "additionalProperties": {"type": "integer"}},
        ["{}"],
        ['{"a":1}'],
    ),
    (
        {"llguidance", "xgrammar"},
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/n"},
            "additionalProperties": {
                "$id": "http://x/y",
                "$ref": "#/$defs/z",
                "$defs": {"z": {"type": "null"}},
            },
            "required": ["b"],
            "$defs": {"n": {"enum": ["a", "b"]}, "z": {"type": "integer"}},
        },
        ['{"b":null}', '{"a":null,"b":null}'],
        ["{}", '{"a":null}', '{"b":1}', '{"b":null,"c":null}'],
    ),
    (
        {"llguidance"},
        {"propertyNames": {"type": "string", "pattern": "^a"}, "additionalProperties": {"type": "null"}},
        ["{}", '{"ab":null}', "1"],
        ['{"ab":1}', '{"b":null}'],
    ),
    (
        {"llguidance"},
        {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
        ["{}", '{"ab":null}'],
        ['{"ab":1}'],
    ),
    (
        {"llguidance"},
        {"type": "string", "pattern": "^20.*Z$", "format": "date-time"},
        ['"2024-01-01T00:00:00Z"'],
        ['"2024"', '"1999-01-01T00:00:00Z"', '"20Z"'],
    ),
    ({"llguidance"}, {"multipleOf": 0.01}, ["0.01", "1", "-2.5"], ["0.001", "1.005"]),
    ({"llguidance"}, {"allOf": [{"minimum": 2}, {"maximum": 3}]}, ["2", "3", "null"], ["1", "4"]),
    (
        {"llguidance", "xgrammar"},
        {"anyOf": [{"type": "null"}, {"const": "a"}]},
        ["null", '"a"'],
        ["1", '"b"'],
    ),
    ({"llguidance"}, {"anyOf": [{"minimum": 5}, {"type": "null"}], "maximum": 6}, ["5", "null"], ["4", "7"]),
    ({"llguidance", "xgrammar"}, {"oneOf": [{"type": "null"}, {"const": "a"}]}, ["null", '"a"'], ["1"]),
    (
        {"llguidance", "xgrammar"},
        {
            "$ref": "#/$defs/t",
            "$defs": {
                "t": {**CLOSED, "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
            },
        },
        ["{}", '{"c":[{},{"c":[]}]}'],
        ["[]", '{"c":[1]}', '{"d":1}'],
    ),
    (
        {"llguidance"},
        {"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": {"type": "integer"}}},
        ["3"],
        ["4", "1.5"],
    ),
]

# Backend, a schema whose keyword is denied to it, and an invalid document that it lets through, or None: it refuses to compile.
DENIED: list[tuple[Backend, str, Any, str | None]] = [
    ("llguidance", "propertyNames", {"propertyNames": {"maxLength": 1}}, None),
    ("llguidance", "dependentRequired", {"dependentRequired": {"a": ["b"]}}, None),
    ("llguidance", "dependentSchemas", {"dependentSchemas": {"a": False}}, None),
    ("llguidance", "unevaluatedProperties", {"allOf": [{}], "unevaluatedProperties": False}, None),
    ("llguidance", "unevaluatedItems", {"contains": True, "unevaluatedItems": False}, None),
    ("llguidance", "uniqueItems", {"uniqueItems": True}, None),
    ("llguidance", "contains", {"contains": {"const": 1}}, None),
    ("llguidance", "not", {"not": {"const": 1}}, None),
    ("llguidance", "if", {"if": {"const": 1}, "then": False}, None),
    ("llguidance", "oneOf", {"oneOf": [{"minimum": 1}, {"maximum": 2}]}, None),
    ("llguidance", "$dynamicRef", {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a"}}}, None),
    ("llguidance", "format", {"format": "iri"}, None),
    ("llguidance", "pattern", {"pattern": "(?=a)"}, None),
    ("llguidance", "const", {"const": 9007199254740993}, "9007199254740992"),
    ("llguidance", "minimum", {"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
    ("llguidance", "exclusiveMinimum", {"exclusiveMinimum": 0, "maximum": 0.5}, "0"),
    ("llguidance", "exclusiveMaximum", {"minimum": -1.5, "exclusiveMaximum": -1}, "-1"),
    ("llguidance", "multipleOf", {"allOf": [{"multipleOf": 3}, {"multipleOf": 1431655766}]}, "2"),
    ("llguidance", "minProperties", {"type": "object", "minProperties": 2}, '{"a":1,"a":1}'),
    ("llguidance", "minProperties", {**CLOSED, "properties": A_B, "minProperties": 2}, None),
    ("llguidance", "maxProperties", {**CLOSED, "properties": A_B, "maxProperties": 0}, None),
    ("llguidance", "patternProperties", {"patternProperties": {"a": True, "b": True}}, None),
    (
        "llguidance",
        "$ref",
        {"properties": {"a": {"$ref": "#", "minProperties": 1}}},
        None,
    ),
    ("xgrammar", "minLength", {"pattern": "a", "minLength": 2}, '"a"'),
    ("xgrammar", "required", {"type": "object", "required": ["a"]}, "{}"),
    ("xgrammar", "not", {"not": {"type": "integer"}}, "1"),
    ("xgrammar", "allOf", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, '"a"'),
    ("xgrammar", "$ref", {"$ref": "#/$defs/a", "minimum": 1, "$defs": {"a": {"type": "integer"}}}, "0"),
    ("xgrammar", "anyOf", {"anyOf": [{"type": "integer"}], "maximum": 1}, "2"),
    ("xgrammar", "uniqueItems", {"type": "array", "uniqueItems": True}, "[1,1]"),
    ("xgrammar", "multipleOf", {"type": "number", "multipleOf": 2}, "3"),
    ("xgrammar", "type", {"minLength": 3}, '"a"'),
]


@pytest.fixture(scope="module")
def walks() -> Walks:
    return Walks(byte_vocabulary())


def plan_for(schema: Any) -> EnforcementPlan:
    return plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits())


@pytest.mark.parametrize(("backends", "schema", "valid", "invalid"), GRANTED)
def test_granted(
    walks: Walks, backends: set[Backend], schema: Any, valid: list[str], invalid: list[str]
) -> None:
    plan = plan_for(schema)
    assert plan.enforcement == "full" and plan.backends == backends
    validator = Validator(schema)
    for backend in backends:
        start = walks.start(plan.schema, backend)
        assert [text for text in valid if not walks.accepts(start, text)] == []
        assert [text for text in invalid if walks.accepts(start, text)] == []
    for text in valid:
        validator.validate(text)


@pytest.mark.parametrize(("backend", "keyword", "schema", "let_through"), DENIED)
def test_denied(walks: Walks, backend: Backend, keyword: str, schema: Any, let_through: str | None) -> None:
    """The library, given the schema as it is, refuses it or breaks it."""
    assert keyword in KEYWORDS
    if let_through is None:
        with pytest.raises(GrammarInvalid):
            walks.start(schema, backend)
        return
    assert walks.accepts(walks.start(schema, backend), let_through)
    relaxed_validator = Validator(schema)
    with pytest.raises(SchemaNotSatisfied):
        relaxed_validator.validate(let_through)
    try:
        plan = plan_for(schema)
    except GrammarRefused:
        return
    assert plan.enforcement == "validated" or backend not in plan.backends


def test_every_keyword_of_the_table_is_probed() -> None:
    probed = {keyword for _, keyword, _, _ in DENIED}
    for _, schema, _, _ in GRANTED:
        probed |= schema.keys() | {"$format"} & {"$" + keyword for keyword in schema}
    assert KEYWORDS.keys() - probed == set()


def _check_walks(walks: Walks, schema: Any, count: int, seed: int) -> bool:
    """Whether the schema is held; if it is in full, all that its grammars write is valid."""
    try:
        plan = plan_for(schema)
        starts = [(backend, walks.start(plan.schema, backend)) for backend in sorted(plan.backends)]
    except GrammarRefused:
        return False
    validator = Validator(schema)
    for backend, start in starts:
        for text in walks.texts(start, count, seed):
            # Half of a surrogate pair is what xgrammar writes and no Unicode text can plan.
            if plan.enforcement == "full" and not (backend == "xgrammar" and "\\u" in text):
                _assert_valid(validator, text, schema)
    return True


def _assert_valid(validator: Validator, text: str, schema: Any) -> None:
    try:
        validator.validate(text)
    except SchemaNotSatisfied as error:
        # Both are JSON, and no schema speaks of them.
        if "a key twice" not in str(error) and "a number beyond" not in str(error):
            raise AssertionError(f"{text} under {json.dumps(schema)}: {error}") from error


def test_random_texts_of_the_suites_grammars_are_valid(walks: Walks) -> None:
    held = [_check_walks(walks, group.schema, 10, seed) for seed, group in enumerate(groups())]
    assert sum(held) >= 165


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_texts_of_a_format_are_valid(walks: Walks, name: str) -> None:
    assert _check_walks(walks, {"type": "string", "format": name}, 60, 1)


def test_random_texts_of_random_schemas_are_valid(walks: Walks) -> None:
    held = [_check_walks(walks, random_schema(random.Random(seed)), 6, seed) for seed in range(150)]
    assert sum(held) >= 80


def test_a_number_range_lets_no_number_beyond_through(walks: Walks) -> None:
    bounds = (-10, -1.5, -1, -0.5, 0, 0.25, 0.5, 1, 1.5, 9, 10)
    texts = [
        "-10.1",
        "-10",
        "-9",
        "-1.6",
        "-1.5",
        "-1.0",
        "-1",
        "-0.51",
        "-0.5",
        "-0",
        "0",
        "0.0",
        "0.1",
        "0.25",
        "0.26",
        "0.5",
        "0.6",
        "1",
        "1.0",
        "1.1",
        "1.5",
        "1.6",
        "2",
        "9",
        "9.5",
        "10",
        "10.0",
        "10.1",
    ]
    for least in ("minimum", "exclusiveMinimum"):
        for most in ("maximum", "exclusiveMaximum"):
            for index, low in enumerate(bounds):
                for high in bounds[index + 1 :]:
                    schema = {"type": "number", least: low, most: high}
                    plan = plan_for(schema)
                    start = walks.start(plan.schema, "llguidance")
                    validator = Validator(schema)
                    for text in texts:
                        if walks.accepts(start, text) and plan.enforcement == "full":
                            validator.validate(text)
