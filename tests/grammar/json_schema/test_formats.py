"""Formats let the usual through and nothing that the validator's own reading of the RFC refuses."""

import json

import pytest
from tests.grammar.grammar_walks import Walks

from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.constraints import SchemaLimits
from loraplex.grammar.enforcement.planner import plan_enforcement
from loraplex.grammar.errors import SchemaNotEnforceable, SchemaNotSatisfied
from loraplex.grammar.json_schema.formats import FORMATS, VALIDATED_FORMATS, format_pattern
from loraplex.grammar.json_schema.validator import Validator

USUAL = {
    "date": ["2024-02-29", "2000-02-29", "2023-12-31"],
    "date-time": ["2024-01-01T00:00:00Z", "2024-01-31T23:59:59.123+02:00"],
    "duration": ["P1DT2H", "PT5M", "P2W", "P1Y2M3D"],
    "email": ["john.doe+x@example.com", "a@b"],
    "hostname": ["example.com", "a-b.example.co.uk", "localhost"],
    "ipv4": ["127.0.0.1", "255.255.255.255"],
    "ipv6": ["::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "::"],
    "time": ["12:00:00Z", "23:59:59.5-11:30"],
    "uri": ["https://example.com/a/b?c=d&e=%20#f", "mailto:a@b.c", "http://localhost:8080/"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
WRONG = {
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "24-01-01", "2024-1-1"],
    "date-time": ["2024-01-01", "2024-01-01T24:00:00Z", "2024-01-01T00:00:00", "2024-01-01 00:00:00Z"],
    "duration": ["P", "1D", "PT", "P1S"],
    "email": ["a", "a@", ".a@b", "a..b@c"],
    "hostname": ["-a", "a-", "a..b", "a_b", ""],
    "ipv4": ["256.1.1.1", "1.1.1", "01.1.1.1"],
    "ipv6": ["1::2::3", ":::", "12345::", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7"],
    "time": ["12:00:00", "24:00:00Z", "12:60:00Z", "12:00:60Z"],
    "uri": ["a/b", "//a", "http://a b", "http://[::1", ":x"],
    "uuid": ["123e4567e89b12d3a456426614174000", "x23e4567-e89b-12d3-a456-426614174000"],
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(name: str) -> None:
    schema = {"type": "string", "format": name}
    plan = plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits())
    assert plan.backends == {"llguidance"}
    walks = Walks(byte_vocabulary())
    start = walks.start(plan.schema, "llguidance")
    validator = Validator(schema)
    for text in USUAL[name]:
        assert walks.accepts(start, json.dumps(text)), text
        validator.validate(json.dumps(text))
    for text in WRONG[name]:
        assert not walks.accepts(start, json.dumps(text)), text


def test_formats_only_speak_of_strings() -> None:
    plan = plan_enforcement({"format": "date"}, strict=True, param="schema", limits=SchemaLimits())
    walks = Walks(byte_vocabulary())
    start = walks.start(plan.schema, "llguidance")
    assert walks.accepts(start, "1") and walks.accepts(start, "{}") and not walks.accepts(start, '"x"')


@pytest.mark.parametrize("name", sorted(VALIDATED_FORMATS))
def test_formats_without_a_grammar_are_validated(name: str) -> None:
    assert format_pattern(name) is None
    plan = plan_enforcement({"format": name}, strict=False, param="schema", limits=SchemaLimits())
    assert plan.validation_schema is not None and [each.pointer for each in plan.unenforced] == ["/format"]
    wrong = {"json-pointer": "a", "relative-json-pointer": "x", "regex": "(", "uri-template": "{"}
    with pytest.raises(SchemaNotSatisfied, match="format"):
        Validator(plan.validation_schema).validate(json.dumps(wrong.get(name, "\\ \\")))


def test_an_unknown_format_is_an_annotation_and_no_ground_for_strictness() -> None:
    schema = {"items": {"type": "string", "format": "color"}}
    assert plan_enforcement(schema, strict=False, param="schema", limits=SchemaLimits()).enforcement == "full"
    with pytest.raises(SchemaNotEnforceable, match="color") as caught:
        plan_enforcement(schema, strict=True, param="schema", limits=SchemaLimits())
    assert caught.value.pointer == "/items/format"
