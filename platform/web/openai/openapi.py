"""OpenAPI schemas of the inference plane: the models of request bodies, responses and stream events, by status."""

from typing import Any

from pydantic import BaseModel

from loraplex.platform.parameters.request_models import ModelRequest
from loraplex.platform.web.openapi import reference
from loraplex.platform.web.responses import documented


def generation_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Build the responses of a route that generates text: the whole one, or with `stream` events with a chunk each."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": reference(chunk)}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": data, "event": {"enum": ["message", "error"]}},
    }
    success = {
        "description": "The whole response, or with `stream` its events. The last one is `[DONE]`, or `error` with an error object.",
        "model": whole,
        "content": {"text/event-stream": {"itemSchema": event}},
    }
    return {200: success, **documented(422, 504)}


def body_schema(model: type[ModelRequest]) -> dict[str, Any]:
    """Build the `requestBody` of one operation."""
    content = {"application/json": {"schema": reference(model)}}
    return {"requestBody": {"required": True, "content": content}}
