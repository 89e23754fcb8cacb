"""Structural tags before the library reads them."""

from typing import Any

import pytest

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.emit_xgrammar import OPEN_JSON_SCHEMA, ebnf_source
from loraplex.grammar.backends.structural_tag import (
    lowered,
    may_force_without_end,
    named_tokens,
    read_structural_tag,
)
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.spec import GrammarSpec, encode_spec

OPEN = {"type": OPEN_JSON_SCHEMA, "json_schema": {"type": "integer"}, "whitespace": "compact"}


@pytest.mark.parametrize("source", ["", "{", "[]", "{}", '{"format": 1}'])
def test_what_is_no_tag(source: str) -> None:
    with pytest.raises(GrammarInvalid, match="structural tag"):
        read_structural_tag(source)


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: inner,
        lambda inner: {"type": "sequence", "elements": [inner]},
        lambda inner: {"type": "star", "content": inner},
        lambda inner: {"type": "dispatch", "rules": [["<t>", inner]]},
        lambda inner: {"type": "triggered_tags", "tags": [{"type": "tag", "begin": "a", "content": inner}]},
    ],
)
def test_our_format_is_found_wherever_a_format_can_stand(around: Any) -> None:
    assert OPEN_JSON_SCHEMA not in str(lowered(around(OPEN)))
    assert "grammar" in str(lowered(around(OPEN)))


def test_nothing_inside_a_schema_is_taken_for_a_format() -> None:
    schema = {"const": {"elements": [OPEN], "type": "token", "token": "x"}, "content": OPEN}
    content = {"type": "json_schema", "json_schema": schema}
    assert lowered(content) == content
    assert list(named_tokens(content)) == []


def test_named_tokens() -> None:
    tags = [
        {
            "type": "tag",
            "begin": {"type": "token", "token": "a"},
            "content": OPEN,
            "end": {"type": "token", "token": 7},
        }
    ]
    content = {
        "type": "or",
        "elements": [
            {"type": "token_triggered_tags", "trigger_tokens": ["b"], "tags": tags},
            {"type": "token_dispatch", "rules": [["c", {"type": "token", "token": "d"}]]},
            {"type": "exclude_token", "exclude_tokens": ["e"]},
        ],
    }
    assert set(named_tokens(content)) == {"a", 7, "b", "c", "d"}


@pytest.mark.parametrize(
    ("content", "may"),
    [
        ({"type": "const_string", "value": "a"}, False),
        ({"type": "json_schema", "json_schema": {"type": "grammar"}}, False),
        ({"type": "regex", "pattern": "[a-z]+"}, False),
        ({"type": "regex", "pattern": "a{90000}"}, True),
        ({"type": "repeat", "min": 100_000, "content": {"type": "const_string", "value": "a"}}, True),
        ({"type": "sequence", "elements": [{"type": "grammar", "grammar": 'root ::= "a" root'}]}, True),
    ],
)
def test_what_may_be_certain_without_end(content: dict[str, Any], may: bool) -> None:
    assert may_force_without_end(content) is may


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root',
        "\n".join([f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)] + ['r60 ::= "a"', "root ::= r0"]),
    ],
)
def test_endless_certain_text_is_not_written_out(text: str) -> None:
    vocabulary = byte_vocabulary()
    spec = encode_spec(GrammarSpec(backend="xgrammar", source=ebnf_source(text), close=True))
    mask = MaskCompiler(vocabulary).compile(bytes(32), spec)
    assert mask.accept(vocabulary.token_id("a"))
    assert not mask.forced_tokens()
    assert mask.closing_tokens(8) is None
