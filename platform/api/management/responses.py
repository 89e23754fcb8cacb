"""Answers of the planes: a status, a document, and its revision as a strong ETag (RFC 9110)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.responses import Response

UtcTime = Annotated[datetime, AfterValidator(lambda time: time.astimezone(UTC))]
"""A time, shown in UTC as RFC 3339 writes it."""
EVERYWHERE: Final = (400, 401, 403, 404, 408, 413, 503)
"""What any route of the planes may answer: see the table in `platform.errors`."""


class ResponseModel(BaseModel):
    """Base of what routes show."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


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
    """`etag`: the revision of what `document` shows; the next change names it in If-Match."""

    status: int
    document: BaseModel | None = None
    etag: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def respond(answer: ApiResponse) -> Response:
    """The HTTP response; without a document there is no body."""
    headers = dict(answer.headers)
    if answer.etag is not None:
        headers["etag"] = f'"{answer.etag}"'
    if answer.document is None:
        return Response(status_code=answer.status, headers=headers)
    content = answer.document.model_dump_json()
    return Response(content, answer.status, headers, media_type="application/json")


def documented(
    *statuses: int, answer: type[BaseModel] | None = None, status: int = 200
) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: `answer` under `status`, and errors under `statuses` and those of everywhere."""
    errors: dict[int | str, dict[str, Any]] = {
        each: {"model": ErrorDocument} for each in sorted({*EVERYWHERE, *statuses})
    }
    return errors if answer is None else {status: {"model": answer}, **errors}
