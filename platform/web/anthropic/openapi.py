"""OpenAPI schemas of the Messages API: bodies, responses, events and errors."""

from typing import Any, Final

from pydantic import BaseModel

from loraplex.platform.parameters.request_models import ModelRequest
from loraplex.platform.web.anthropic.response_models import MessageErrorDocument
from loraplex.platform.web.openapi import reference
from loraplex.platform.web.responses import EVERYWHERE

EVENTS: Final = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop", "ping", "error"),
)


def described(body: type[ModelRequest]) -> dict[str, Any]:
    """Build a route's `openapi_extra`: its body."""
    content = {"application/json": {"schema": reference(body)}}
    return {"requestBody": {"required": True, "content": content}}


def responses(whole: type[BaseModel], *, streams: bool) -> dict[int | str, dict[str, Any]]:
    """Build the responses of a route, with errors in Anthropic's shape. `streams`: with `stream` it sends events."""
    success: dict[str, Any] = {"model": whole}
    if streams:
        data = {"type": "string", "contentMediaType": "application/json"}
        event = {
            "type": "object",
            "required": ["event", "data"],
            "properties": {"event": {"enum": list(EVENTS)}, "data": data},
        }
        success["description"] = (
            "The whole message, or with `stream` its events. The last one is `message_stop` or `error`."
        )
        success["content"] = {"text/event-stream": {"itemSchema": event}}
    failures = (*EVERYWHERE, 422, 504) if streams else EVERYWHERE
    errors: dict[int | str, dict[str, Any]] = {status: {"model": MessageErrorDocument} for status in failures}
    return {200: success, **errors}
