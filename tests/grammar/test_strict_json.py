"""Strict JSON: what it accepts, every parser reads alike; the rest is refused by its reason."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.errors import (
    JsonNumberRefused,
    JsonRefused,
    JsonTooDeep,
    NotANumber,
    RepeatedName,
)
from loraplex.grammar.strict_json import check_values, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_every_document_is_read_as_it_is(value: Any) -> None:
    assert parse_json(json.dumps(value), max_digits=400) == value


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_json(text, max_digits=400)
    except (JsonRefused, json.JSONDecodeError):
        return


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"a": 1, "a": 1}', RepeatedName, "'a' twice"),
        ('{"a": 1, "\\u0061": 2}', RepeatedName, "'a' twice"),
        ('[{"b": {"c": 1, "d": 2, "c": 3}}]', RepeatedName, "'c' twice"),
        ('{"\\udfff": 1, "\\udfff": 2}', JsonRefused, "surrogate"),
        ("NaN", NotANumber, "holds NaN"),
        ("[-Infinity]", NotANumber, "holds -Infinity"),
        ("1e999", JsonNumberRefused, "too large"),
        ("1" * 11, JsonNumberRefused, "more than 10 digits"),
        ("[" * 100_000, JsonTooDeep, "too deeply"),
        ("[1,]", json.JSONDecodeError, "Expecting value"),
        ("\ufeff1", json.JSONDecodeError, "BOM"),
    ],
)
def test_what_two_parsers_may_read_differently_is_refused(
    text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_json(text, max_digits=10)


def test_numbers_can_be_exact() -> None:
    assert parse_json("[0.10]", max_digits=10, parse_float=Decimal) == [Decimal("0.10")]


def test_arrays_and_objects_count_as_levels_and_what_they_contain_does_not() -> None:
    check_values({"a": [1]}, max_depth=2)
    check_values(1, max_depth=0)
    deeper: list[Any] = [{"a": [[]]}, {"a": [{}]}, [[[1]]]]
    for document in deeper:
        with pytest.raises(JsonTooDeep, match="deeper than 2"):
            check_values(document, max_depth=2)


def test_names_and_values_count_at_every_level() -> None:
    document = {"a": [1, 2], "b": {"c": None}}
    check_values(document, max_depth=9, max_values=9)
    with pytest.raises(JsonRefused, match="more than 8"):
        check_values(document, max_depth=9, max_values=8)


@pytest.mark.parametrize("document", ["\ud800", {"\ud800": 1}, [["\ud800"]], {"a": {"b": "é\udfff"}}])
def test_strings_that_utf_8_cannot_encode_are_found(document: Any) -> None:
    check_values(document, max_depth=2)
    with pytest.raises(JsonRefused, match="lone surrogate"):
        check_values(document, max_depth=2, encodable=True)
