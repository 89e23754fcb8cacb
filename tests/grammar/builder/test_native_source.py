"""Formats in one backend's own language."""

import json
from typing import Any

import pytest

from loraplex.grammar.builder.native_source import native_source
from loraplex.grammar.constraints import ContextFreeGrammar, SchemaLimits, StructuralTag
from loraplex.grammar.errors import GrammarInvalid, GrammarRefused, GrammarTooLarge, SchemaNotEnforceable

CLOSED = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}


def tag(*formats: Any) -> StructuralTag:
    return StructuralTag(
        {"type": "structural_tag", "format": {"type": "sequence", "elements": list(formats)}}
    )


def test_the_backend_follows_from_the_notation() -> None:
    assert native_source(ContextFreeGrammar('start: "a"'), SchemaLimits())[0] == "llguidance"
    assert native_source(ContextFreeGrammar('root ::= "a"'), SchemaLimits())[0] == "xgrammar"


def test_a_structural_tag_goes_as_it_is() -> None:
    schema = {"type": "json_schema", "json_schema": CLOSED, "style": "json"}
    asked = tag(schema, {"type": "const_string", "value": "x"})
    backend, source = native_source(asked, SchemaLimits())
    assert backend == "xgrammar" and json.loads(source) == asked.tag


def test_a_schema_is_written_as_the_backend_is_exact_for_it() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": True}
    _, source = native_source(tag({"type": "json_schema", "json_schema": schema}), SchemaLimits())
    (held,) = json.loads(source)["format"]["elements"]
    assert held["json_schema"]["minItems"] == 1 and "contains" not in held["json_schema"]


def test_what_loosens_a_schema_is_refused() -> None:
    with pytest.raises(GrammarRefused, match="any_order"):
        native_source(tag({"type": "json_schema", "json_schema": CLOSED, "any_order": True}), SchemaLimits())


def test_what_looks_like_a_format_inside_a_schema_is_a_schema() -> None:
    inner = {**CLOSED, "properties": {"type": {"type": "string"}, "json_schema": {"type": "integer"}}}
    native_source(tag({"type": "json_schema", "json_schema": inner}), SchemaLimits())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {}, "uniqueItems": True},
        {"type": "object", "properties": {"a": {"allOf": [{"minLength": 1}, {"maxLength": 2}]}}},
    ],
)
def test_a_schema_that_would_silently_lose_a_keyword_is_refused(schema: Any) -> None:
    for asked in (
        tag({"type": "json_schema", "json_schema": schema}),
        tag(
            {
                "type": "tag",
                "begin": "<",
                "content": {"type": "json_schema", "json_schema": schema},
                "end": ">",
            }
        ),
    ):
        with pytest.raises(SchemaNotEnforceable) as refused:
            native_source(asked, SchemaLimits())
        assert refused.value.param == "structured_outputs.structural_tag"


def test_unproven_styles_are_refused() -> None:
    with pytest.raises(GrammarRefused, match="json"):
        native_source(
            tag({"type": "json_schema", "json_schema": CLOSED, "style": "qwen_xml"}), SchemaLimits()
        )


def test_what_is_no_tag_is_refused() -> None:
    with pytest.raises(GrammarInvalid):
        native_source(StructuralTag({"structures": [], "triggers": []}), SchemaLimits())


@pytest.mark.parametrize(
    ("form", "limits"),
    [
        (ContextFreeGrammar("ä" * 10), SchemaLimits(max_text_bytes=19)),
        (tag(*[{"type": "const_string", "value": "x"}] * 5), SchemaLimits(max_nodes=5, max_enum=5)),
        (tag({"type": "or", "elements": [{"type": "or", "elements": []}]}), SchemaLimits(max_depth=3)),
    ],
)
def test_bounds(form: Any, limits: SchemaLimits) -> None:
    with pytest.raises(GrammarTooLarge, match=r"\d"):
        native_source(form, limits)
