"""Describes what FastAPI cannot derive from a route: its body, query parameters, conditional headers and events.

Invariant: the OpenAPI document is rendered once; its requests cost the event loop no more than sending it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.platform.web.cursors import Listing, page_parameters
from loraplex.platform.web.request_bodies import RequestModel, body_schema
from loraplex.platform.web.responses import documented
from loraplex.platform.web.transport.direct_routes import DirectRoutes

SLASHED: Final = "/v1/"
"""Paths below it may end with a slash, as those of clients do that join a base with a name of their own."""
_FRAMEWORK_ERROR: Final = "HTTPValidationError"
_REFERENCE: Final = "#/components/schemas/{model}"


def described(
    body: type[RequestModel] | None = None,
    *,
    optional_body: bool = False,
    if_match: bool = False,
    if_match_required: bool = True,
    if_none_match: bool = False,
    repeatable: bool = False,
) -> dict[str, Any]:
    """Build a route's `openapi_extra`. `repeatable`: a POST that accepts an Idempotency-Key."""
    parameters: list[dict[str, Any]] = []
    if if_match:
        required = if_match_required and not if_none_match
        etag = r'^"[1-9][0-9]{0,17}"$'
        parameters.append(_header("If-Match", "The ETag of what this changes.", etag, required))
    if if_none_match:
        parameters.append(_header("If-None-Match", "`*`: the resource must not exist yet.", r"^\*$", False))
    if repeatable:
        meaning = (
            "A text that you choose for this request: a repetition with it within a day is carried out once."
        )
        parameters.append(_header("Idempotency-Key", meaning, r"^[!-~]{1,255}$", False))
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    return extra if body is None else {**extra, **body_schema(body, optional=optional_body)}


def listed(item: type[BaseModel], filters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Build the arguments that declare the route of a listing of `item`. `filters`: name -> meaning."""
    return {
        "responses": documented(response=Listing[item]),  # type: ignore[valid-type]
        "openapi_extra": {"parameters": page_parameters(filters)},
    }


class Application(FastAPI):
    """FastAPI without its validation errors in the OpenAPI document: the routes check parameters themselves."""

    models: Sequence[tuple[type[BaseModel], JsonSchemaMode]] = ()
    """Models that are documented besides those of responses; `reference` refers to them."""
    direct: DirectRoutes | None = None
    """The routes whose requests pass none of the framework's layers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith(SLASHED) and path.endswith("/"):
            # Served, not redirected: many clients repeat a redirected POST as a GET.
            scope["path"] = path[:-1]
        if self.direct is not None and self.direct.match(scope):
            scope["app"] = self
            await self.direct.app(scope, receive, send)
            return
        await super().__call__(scope, receive, send)

    def setup(self) -> None:
        """Add a route of the rendered document before FastAPI's own, which renders it for each request."""
        self.add_route("/openapi.json", self._send_document, include_in_schema=False)
        super().setup()

    @cached_property
    def rendered_document(self) -> tuple[bytes, str]:
        """The document and its ETag. Rendering takes a few hundred milliseconds, once; all routes must be included before."""
        document = msgspec.json.encode(self.openapi())
        return document, f'"{hashlib.sha256(document).hexdigest()[:32]}"'

    async def _send_document(self, request: Request) -> Response:
        document, etag = self.rendered_document
        headers = {"etag": etag, "cache-control": "no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(document, headers=headers, media_type="application/json")

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                if _FRAMEWORK_ERROR in str(operation["responses"].get("422")):
                    del operation["responses"]["422"]
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for name in (_FRAMEWORK_ERROR, "ValidationError"):
            schemas.pop(name, None)
        _, definitions = models_json_schema(self.models, ref_template=_REFERENCE)
        schemas.update(definitions.get("$defs", {}))
        return document


def reference(model: type[BaseModel]) -> dict[str, str]:
    """Build a reference to a model of `Application.models` or of a response."""
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def referred_body(model: type[BaseModel], *headers: dict[str, Any]) -> dict[str, Any]:
    """Build the `openapi_extra` of a route whose body's model is one of `Application.models`. `headers`: those it reads."""
    content = {"application/json": {"schema": reference(model)}}
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": content}}
    return {**extra, "parameters": [*headers]} if headers else extra


def streamed(
    whole: type[BaseModel], events: Sequence[str], last: str, data: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the success of a route that generates text. `events`: their names; `last`: the end of a stream; `data`: the schema of
    an event's text.
    """
    properties = {"data": {"type": "string", **data}, "event": {"enum": [*events]}}
    event = {"type": "object", "required": ["data"], "properties": properties}
    return {
        "description": f"The whole response, or with `stream` its events. The last one is {last}.",
        "model": whole,
        "content": {"text/event-stream": {"itemSchema": event}},
    }


def json_text(document: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build the schema of a text that is JSON, of a document of this schema if it is given."""
    content = {} if document is None else {"contentSchema": document}
    return {"contentMediaType": "application/json", **content}


def _header(name: str, meaning: str, pattern: str, required: bool) -> dict[str, Any]:
    schema = {"type": "string", "pattern": pattern}
    return {"in": "header", "name": name, "required": required, "description": meaning, "schema": schema}
