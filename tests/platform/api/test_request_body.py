"""Bodies of many values are checked in a worker before they are parsed."""

import json

import pytest
from starlette.requests import Request

from loraplex.platform.api.request_body import LARGE_BODY, MANY_VALUES, read_object
from loraplex.platform.errors import InvalidBody
from loraplex.platform.parameters.json_object import BodyLimits


async def requested(body: bytes) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "headers": []}, receive)


@pytest.mark.parametrize(
    ("body", "in_worker"),
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
async def test_bodies_of_many_values_are_checked_in_a_worker(body: bytes, in_worker: bool) -> None:
    checked: list[bytes] = []

    async def check_in_worker(data: bytes) -> None:
        checked.append(data)

    parsed = await read_object(await requested(body), BodyLimits(), dict, check_in_worker)
    assert parsed == json.loads(body) and checked == [body] * in_worker


async def test_a_refusal_of_the_worker_is_raised() -> None:
    async def refuse(data: bytes) -> None:
        raise InvalidBody("no")

    with pytest.raises(InvalidBody, match="no"):
        await read_object(await requested(b"[" * 2 * MANY_VALUES), BodyLimits(), dict, refuse)
