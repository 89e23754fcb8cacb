"""JSON bodies at their bounds: size, depth, values, numbers, names."""

import json
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.errors import GatewayError, InvalidBody, InvalidParameter
from loraplex.platform.parameters.json_object import BodyLimits, parse_object, size_of

LIMITS = BodyLimits(max_bytes=1000, max_depth=5, max_values=10)


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_depth_is_bounded() -> None:
    assert parse_object(nested(5), LIMITS)
    with pytest.raises(InvalidBody, match="deeper than 5"):
        parse_object(nested(6), LIMITS)


def test_a_body_deeper_than_the_stack_is_refused() -> None:
    with pytest.raises(InvalidBody):
        parse_object(nested(200_000), BodyLimits())


def test_values_are_bounded() -> None:
    # One object, one name, one list and seven numbers.
    assert parse_object(json.dumps({"a": [0] * 7}).encode(), LIMITS)
    with pytest.raises(InvalidBody, match="more than 10"):
        parse_object(json.dumps({"a": [0] * 8}).encode(), LIMITS)


@pytest.mark.parametrize("digits", [401, 4_299, 100_000])
def test_digits_of_whole_numbers_are_bounded(digits: int) -> None:
    assert parse_object(b'{"a": -' + b"9" * 399 + b"}", BodyLimits())
    with pytest.raises(InvalidBody, match="more than 400 digits"):
        parse_object(b'{"a": ' + b"9" * digits + b"}", BodyLimits())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"\\udfff": 1, "\\udfff": 2}',
        b"{'a': 1}",
        b'\xef\xbb\xbf{"a": 1}',
    ],
)
def test_bodies_that_are_no_json_objects_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        parse_object(body, LIMITS)


@pytest.mark.parametrize("body", [b'{"model": 1, "model": 2}', b'{"a": {"b": 1, "b": 1}}'])
def test_a_name_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidParameter, match="twice"):
        parse_object(body, LIMITS)


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body, LIMITS), dict)
    except GatewayError:
        return


@given(
    st.dictionaries(
        st.text(max_size=3), st.integers() | st.text(max_size=3) | st.booleans() | st.none(), max_size=3
    )
)
def test_small_objects_are_read_as_they_are(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode(), LIMITS) == value


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, 1), ("abc", 4), ([], 1), (["ab", 1], 5), ({"key": "ab"}, 7), ({"a": {"b": [True]}}, 6)],
)
def test_every_value_and_every_character_counts(value: object, size: int) -> None:
    assert size_of(value, 100) == size


def test_counting_ends_above_the_limit() -> None:
    assert size_of(["a" * 5, ["a"] * 5, "a" * 5], 10) == 13


class Unread(list[object]):
    def __iter__(self) -> NoReturn:
        raise AssertionError("read although its length decides")


def test_a_long_list_is_not_read() -> None:
    assert size_of({"a": Unread([0] * 1_000)}, 100) > 100
