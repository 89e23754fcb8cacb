"""Bodies are closed and strict, and the field at fault is named."""

from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import AwareDatetime, Field
from tests.platform.web.hand_made_requests import request

from loraplex.platform.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
)
from loraplex.platform.web.request_bodies import (
    RequestModel,
    body_schema,
    body_sha256,
    request_model,
)


class Share(RequestModel):
    version: int = Field(ge=1)


class Thing(RequestModel):
    name: str = Field(max_length=5)
    until: AwareDatetime | None = None
    split: list[Share] = Field(default_factory=list)


async def read(body: object, optional: bool = False) -> Any:
    return await request_model(Thing, optional=optional).dependency(request("POST", body=body))


async def test_a_body_becomes_its_model() -> None:
    thing = await read({"name": "a", "until": "2026-11-21T10:00:00Z", "split": [{"version": 3}]})
    assert thing == Thing(name="a", until=datetime(2026, 11, 21, 10, tzinfo=UTC), split=[Share(version=3)])
    assert thing.model_fields_set == {"name", "until", "split"}


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"name": "a", "colour": "red"}, UnknownParameter, "colour"),
        ({"name": "a", "colour": None}, UnknownParameter, "colour"),
        ({"name": "a", "split": [{"version": 1, "x": 1}]}, UnknownParameter, "split.0.x"),
        ({}, MissingParameter, "name"),
        ({"name": 1}, InvalidParameter, "name"),
        ({"name": "abcdef"}, InvalidParameter, "name"),
        ({"name": "a", "split": [{"version": "3"}]}, InvalidParameter, "split.0.version"),
        ({"name": "a", "split": [{"version": True}]}, InvalidParameter, "split.0.version"),
        ({"name": "a", "split": [{"version": 1.0}]}, InvalidParameter, "split.0.version"),
        ({"name": "a", "until": "2026-11-21T10:00:00"}, InvalidParameter, "until"),
        ({"name": "a\0"}, InvalidParameter, "name"),
        ({"name": "a", "split": [{"a\0": 1}]}, InvalidParameter, None),
        (b'{"name": "a", "name": "b"}', InvalidParameter, "name"),
        ([], InvalidBody, None),
        (b"", InvalidBody, None),
        ({"name": "a" * 70_000}, BodyTooLarge, None),
        (b'{"name": [' + b"1," * 25_000 + b"1]}", InvalidBody, None),
    ],
)
async def test_invalid_bodies_are_refused(body: object, error: type[Exception], param: str | None) -> None:
    with pytest.raises(error) as refused:
        await read(body)
    assert type(refused.value) is error
    assert getattr(refused.value, "param", None) == param


async def test_an_error_does_not_quote_the_body() -> None:
    secret = "lpx_live_secretsecret"
    for body in (
        {"name": secret},
        {"name": "a", "until": secret},
        {"name": "a", "split": [{"version": secret}]},
    ):
        with pytest.raises(InvalidParameter) as refused:
            await read(body)
        assert secret not in str(refused.value) and refused.value.__cause__ is None


async def test_an_empty_body_where_it_is_allowed() -> None:
    with pytest.raises(MissingParameter, match="name"):
        await read(b"", optional=True)


async def test_the_hash_is_of_the_content() -> None:
    hashes = []
    for body in (b'{"name": "a", "split": []}', b'{ "split":[], "name":"a" }', {"name": "b"}):
        made = request("POST", body=body)
        await request_model(Thing).dependency(made)
        hashes.append(body_sha256(made))
    assert hashes[0] == hashes[1] != hashes[2] and body_sha256(request()) not in hashes


def test_the_schema_has_no_references() -> None:
    schema = body_schema(Thing)["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False and schema["required"] == ["name"]
    assert schema["properties"]["split"]["items"]["properties"]["version"]["minimum"] == 1
    assert "$ref" not in str(schema) and "$defs" not in str(schema)
