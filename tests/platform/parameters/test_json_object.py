"""Bodies at their bounds: size, depth, values, numbers, names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from loraplex.platform.api.request_body import LARGE_BODY, MANY_VALUES, read_object
from loraplex.platform.errors import GatewayError, InvalidBody, InvalidParameter
from loraplex.platform.parameters.json_object import BodyLimits, parse_object

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


async def requested(body: bytes) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": []}, receive)


@pytest.mark.parametrize(
    ("body", "elsewhere"),
    [
        (json.dumps({"a": [0] * (MANY_VALUES - 2)}).encode(), False),
        (json.dumps({"a": [0] * MANY_VALUES}).encode(), True),
        (json.dumps({"a": [[]] * MANY_VALUES}).encode(), True),
        (json.dumps({"a": [{}] * MANY_VALUES}).encode(), True),
        (json.dumps({str(name): 0 for name in range(MANY_VALUES + 1)}).encode(), True),
        (json.dumps({"a": "b" * 2 * LARGE_BODY}).encode(), False),
        (b"{}", False),
    ],
)
async def test_bodies_of_many_values_are_looked_through_elsewhere(body: bytes, elsewhere: bool) -> None:
    asked: list[bytes] = []

    async def check_elsewhere(data: bytes) -> None:
        asked.append(data)

    found = await read_object(await requested(body), BodyLimits(), dict, check_elsewhere)
    assert found == json.loads(body) and asked == [body] * elsewhere


async def test_what_is_refused_elsewhere_is_refused() -> None:
    async def refuse(data: bytes) -> None:
        raise InvalidBody("no")

    with pytest.raises(InvalidBody, match="no"):
        await read_object(await requested(b"[" * 2 * MANY_VALUES), BodyLimits(), dict, refuse)


@pytest.mark.parametrize("digits", [401, 4_299, 100_000])
def test_whole_numbers_have_so_many_digits(digits: int) -> None:
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
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
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
