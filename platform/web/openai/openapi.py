"""OpenAPI schemas of the inference plane: the models of request bodies, responses and stream events, by status."""

from typing import Any

from pydantic import BaseModel

from loraplex.platform.web.openapi import json_text, reference, streamed
from loraplex.platform.web.responses import ErrorDocument, documented


def generation_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Build the responses of a route that generates text: the whole one, or with `stream` events with a chunk each."""
    last = "`[DONE]`, or `error` with an error object"
    texts = [json_text(reference(chunk)), json_text(reference(ErrorDocument)), {"const": "[DONE]"}]
    success = streamed(whole, ("message", "error"), last, {"anyOf": texts})
    return {200: success, **documented(422, 504)}
