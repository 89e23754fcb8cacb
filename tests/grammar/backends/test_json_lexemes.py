"""Literals cut as JSON is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.backends.json_lexemes import json_lexemes, needs_lexemes, unfinished, with_prefix
from loraplex.grammar.tree import Alternation, Concatenation, JsonValue, Literal, Separated

VALUE = JsonValue(True)


def test_pieces() -> None:
    pieces = ["{", '"a b\\""', ":", " ", "[", "tool", ",", "1", "]", "\n", '"un{']
    assert json_lexemes("".join(pieces)) == pieces


@given(st.text('{}[]:,"\\ a\n0é', min_size=1))
def test_the_pieces_are_the_text(text: str) -> None:
    pieces = json_lexemes(text)
    assert "".join(pieces) == text and all(pieces)
    assert text.endswith(unfinished(text))


@pytest.mark.parametrize(
    ("text", "rest"), [('{"name": "', '"'), ('{"na', '"na'), ('"a"', ""), ("{", ""), ('"a\\"', '"a\\"')]
)
def test_an_unfinished_string(text: str, rest: str) -> None:
    assert unfinished(text) == rest


def test_only_a_literal_beside_a_value_needs_it() -> None:
    call = Concatenation((Literal('{"name": '), VALUE))
    assert needs_lexemes(Alternation((VALUE, call)))
    assert needs_lexemes(
        Concatenation((Literal("x"), Separated(Alternation((Separated(call, ";"), VALUE)), ",")))
    )
    assert not needs_lexemes(Alternation((VALUE, Literal("<call>"))))
    assert not needs_lexemes(Alternation((call, call)))


def test_a_prefix_goes_to_every_beginning() -> None:
    node = Concatenation((Alternation((Literal("a"), Concatenation((Literal("b"), VALUE)))), VALUE))
    assert with_prefix(node, '"') == Concatenation(
        (Alternation((Literal('"a'), Concatenation((Literal('"b'), VALUE)))), VALUE)
    )
    assert with_prefix(VALUE, '"') == Concatenation((Literal('"'), VALUE))
