"""The scanner finds the end of a JSON value in any cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.parsing.json_scanner import ValueScanner, whole_value

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["}", '"', "\\", '{"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)
containers = (
    st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3) | st.text()
)


@given(containers, st.booleans(), st.text(max_size=5))
def test_ends_with_the_last_character_of_the_value(value: object, ascii_only: bool, after: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    whole, single = ValueScanner(), ValueScanner()
    assert whole.scan(text + after) == len(text) and whole.closed
    for position, character in enumerate(text):
        assert not single.closed, text[:position]
        assert single.scan(character) == 1
    assert single.closed


@given(containers)
def test_every_beginning_is_cut(value: object) -> None:
    text = json.dumps(value)
    assert whole_value(text) == whole_value(text + "<|end|>") == text
    assert all(whole_value(text[:length]) is None for length in range(len(text)))


@pytest.mark.parametrize("text", ["12", "true", " null", "-1.5e3"])
def test_a_number_or_a_word_has_no_end_of_its_own(text: str) -> None:
    assert whole_value(text) == text
