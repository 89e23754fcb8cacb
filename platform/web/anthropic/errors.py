"""Errors as clients of Anthropic know them: their shape, types and texts, on the paths of the Messages API.

Invariant: what such a client is told of an error is what `platform.errors` tells of it.
"""

from dataclasses import replace
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request

from loraplex.platform.errors import ClientError, ContextTooLong, UnknownParameter, describe
from loraplex.platform.observability.request_id import HEADER

VERSION_HEADER: Final = "anthropic-version"
REQUEST_ID_HEADER: Final = "request-id"
_MESSAGES: Final = "/v1/messages/"
_MODELS: Final = "/v1/models/"
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request"}}
"""By parameter at fault: by these the tool runner of Anthropic's client sends the whole conversation."""
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; of others `invalid_request_error` below 500, else `api_error`."""


def is_anthropic(request: Request) -> bool:
    """Return whether the response to a request has Anthropic's shape."""
    path = f"{request.scope['path']}/"
    return path.startswith(_MESSAGES) or (path.startswith(_MODELS) and VERSION_HEADER in request.headers)


def client_headers(given: Headers, response_headers: dict[str, str]) -> dict[str, str]:
    """Return the headers by which its client knows a response: the request's id and version."""
    echoed = {VERSION_HEADER: given[VERSION_HEADER]} if VERSION_HEADER in given else {}
    request_id = response_headers.get(HEADER)
    return echoed if request_id is None else {REQUEST_ID_HEADER: request_id, **echoed}


def described(error: Exception) -> ClientError:
    """Return the client's view of an exception, with the texts by which Claude Code knows what to do next."""
    known = describe(error)
    if isinstance(error, UnknownParameter):
        return replace(known, message=f"{error.param}: Extra inputs are not permitted. {known.message}")
    sizes = error.sizes if isinstance(error, ContextTooLong) else None
    if sizes is None:
        return known
    left = sizes.context - sizes.prompt
    if left < 1:
        return replace(known, message=f"prompt is too long: {sizes.prompt} tokens > {sizes.context} maximum")
    text = (
        f"max_tokens: {sizes.completion} > {left}, which is the maximum allowed number of output tokens for"
    )
    return replace(known, message=f"{text} {sizes.model}")


def error_document(error: ClientError, request_id: str) -> dict[str, Any]:
    """Build `{"type": "error", "error": {"type", "message", "details"?}, "request_id"}`."""
    status = error.row.status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": _DETAILS[error.param]} if error.param in _DETAILS else {}
    told = {"type": kind, "message": error.message, **details}
    return {"type": "error", "error": told, "request_id": request_id}
