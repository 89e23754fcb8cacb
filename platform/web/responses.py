"""Responses of the management routes: a status, a document, and its revision as a strong ETag (RFC 9110)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from starlette.responses import Response

from loraplex.tenants.records import OneTimeSecret, Record
from loraplex.tenants.stored_responses import StoredResponse

REPLAYED_HEADER: Final = "idempotency-replayed"
EVERYWHERE: Final = (400, 401, 403, 404, 408, 413, 415, 429, 503)
"""Error statuses that any management route may return: see the table in `platform.errors`."""

FORMULA: Final = re.compile(r"(^|[;\t\r\n])(?=[=+\-@\t\r\n])")
"""Where a formula of a spreadsheet begins (OWASP, "CSV injection"): in a cell, or behind what some of them split a cell at."""


class ResponseModel(Record):
    """Base of the response schemas that are no records of a use case."""


class ErrorDetails(ResponseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorDocument(ResponseModel):
    """The OpenAI error object."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """`etag`: the revision that `document` represents; the next change names it in If-Match."""

    status: int
    document: BaseModel | None = None
    etag: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def csv_text(value: Any) -> Any:
    """Return the value of a cell so that no spreadsheet reads it as a formula; numbers with a sign stay."""
    if isinstance(value, str) and not value.removeprefix("-").isdecimal():
        return FORMULA.sub(r"\1'", value)
    return value


def respond(response: ApiResponse) -> Response:
    """Build the HTTP response; without a document it has no body."""
    headers = dict(response.headers)
    if response.etag is not None:
        headers["etag"] = f'"{response.etag}"'
    if response.document is None:
        return Response(status_code=response.status, headers=headers)
    content = response.document.model_dump_json()
    return Response(content, response.status, headers, media_type="application/json")


def reply_with(record: BaseModel | None, status: int) -> ApiResponse:
    """Reply with what a use case or query returned; nothing of it is sent with 204. Its `revision` is its ETag; a secret is
    kept by no cache.
    """
    if status == 204:
        return ApiResponse(status)
    headers = {"cache-control": "no-store"} if isinstance(record, OneTimeSecret) else {}
    return ApiResponse(status, record, getattr(record, "revision", None), headers)


def to_stored(response: Response) -> StoredResponse:
    """Return a response as it is stored for repetitions of its request."""
    return StoredResponse(response.status_code, response.headers.items(), bytes(response.body))


def from_stored(stored: StoredResponse) -> Response:
    """Build the HTTP response; a replayed one says so in the header `idempotency-replayed`."""
    headers = dict(stored.headers)
    if stored.replayed:
        headers[REPLAYED_HEADER] = "true"
    return Response(stored.body, stored.status, headers)


def documented(
    *statuses: int, response: type[BaseModel] | None = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """Build a route's `responses`: `response` under `status`, and errors under `statuses` and `EVERYWHERE`."""
    errors: dict[int | str, dict[str, Any]] = {
        each: {"model": ErrorDocument} for each in sorted({*EVERYWHERE, *statuses})
    }
    return errors if response is None else {status: {"model": response}, **errors}
