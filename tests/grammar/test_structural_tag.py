"""Structural tags before the library reads them."""

from typing import Any

import pytest

from loraplex.grammar.emit_xgrammar import OPEN_JSON_SCHEMA
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.structural_tag import lowered, named_tokens, read_structural_tag

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
