"""Reads the bodies of management requests: small JSON objects into strict pydantic models.

Invariant: an unknown field is refused, no value is converted from another type, and an error names the field at fault.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from loraplex.platform.errors import InvalidParameter, MissingParameter, UnknownParameter
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.web.transport.body_budget import body_lease
from loraplex.platform.web.transport.request_body import read_object

BODY_LIMITS: Final = BodyLimits(max_bytes=64 << 10, body_s=30.0, max_depth=16, max_values=5000)
_NO_BODY: Final = hashlib.sha256(b"").digest()
_NAME_LENGTH: Final = 64

_RFC_3339: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)")


def _rfc_3339(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not _RFC_3339.fullmatch(value):
        raise ValueError("it should be a time as in RFC 3339, such as 2030-01-31T12:00:00Z")
    return datetime.fromisoformat(value.upper())


Time = Annotated[AwareDatetime, BeforeValidator(_rfc_3339)]
"""A time in a request, with its zone."""

BodyT = TypeVar("BodyT", bound="RequestModel")
ReadT = TypeVar("ReadT")


class RequestModel(BaseModel):
    """Base of every request body: closed and strict. `model_fields_set` holds the fields that a PATCH names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


def request_model(model: type[BodyT], *, optional: bool = False) -> Any:
    """Return a dependency that reads the body as `model`. An `optional` body may be empty, which reads as `{}`.

    Place it after the caller among a route's parameters: then only the body of an authorized caller is read.
    """
    return body_read_by(partial(validated, model), optional=optional)


def body_read_by(check: Callable[[dict[str, Any]], ReadT], *, optional: bool = False) -> Any:
    """Return a dependency that reads the body with `check`. The hash of the body is stored in the request's state."""

    async def read(request: Request) -> ReadT:
        def checked(document: dict[str, Any]) -> ReadT:
            request.state.body_sha256 = hashlib.sha256(_canonical(document)).digest()
            _refuse_nul(document)
            return check(document)

        async def check_in_worker(body: bytes) -> None:
            await asyncio.to_thread(parse_object, body, BODY_LIMITS)

        if optional and _is_empty(request):
            return checked({})
        with body_lease(request) as lease:
            return await read_object(request, BODY_LIMITS, checked, check_in_worker, lease)

    return Depends(read)


def validated(model: type[BodyT], document: Mapping[str, Any]) -> BodyT:
    """Validate `document` as `model`. Raises `InvalidParameter`."""
    try:
        # As JSON: only there does a strict model accept times and ids as text.
        return model.model_validate_json(_canonical(document))
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Not chained: pydantic's text quotes the body.
        raise _refusal(model, details) from None


def body_sha256(request: Request) -> bytes:
    """Return the hash of the body that was read, independent of the order of its names; without a body that of no bytes."""
    digest: bytes = getattr(request.state, "body_sha256", _NO_BODY)
    return digest


def body_schema(model: type[RequestModel], *, optional: bool = False) -> dict[str, Any]:
    """Build the `requestBody` of an operation, for `openapi_extra`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, definitions)}}
    return {"requestBody": {"required": not optional, "content": content}}


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _refuse_nul(value: Any, name: str | None = None) -> None:
    """Raise for a NUL character, which JSON can express and PostgreSQL's `text` cannot store."""
    if isinstance(value, dict):
        for key, each in value.items():
            _refuse_nul(key)
            _refuse_nul(each, name or key)
    elif isinstance(value, list):
        for each in value:
            _refuse_nul(each, name)
    elif isinstance(value, str) and "\0" in value:
        raise InvalidParameter("The body holds a NUL character.", param=name)


def _is_empty(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _refusal(model: type[RequestModel], details: ErrorDetails) -> InvalidParameter:
    param = ".".join(str(part)[:_NAME_LENGTH] for part in details["loc"]) or None
    if details["type"] == "extra_forbidden":
        top = len(details["loc"]) == 1
        allowed = f"; allowed: {', '.join(model.model_fields) or 'none'}" if top else ""
        return UnknownParameter(f"Unknown field `{param}`{allowed}.", param=param)
    if details["type"] == "missing":
        return MissingParameter(f"`{param}` is required.", param=param)
    reason = details["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return InvalidParameter(f"`{param or 'body'}` is not allowed: {reason}.", param=param)


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by their definitions: OpenAPI resolves them from the document's root, which lacks these models."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if reference is not None:
        beside = {name: each for name, each in schema.items() if name != "$ref"}
        return _inlined({**definitions[reference.rpartition("/")[2]], **beside}, definitions)
    return {name: _inlined(each, definitions) for name, each in schema.items()}
