"""OpenAPI schemas of the inference plane: the models of request bodies, responses and stream events, by status."""

from typing import Any

from pydantic import BaseModel

from loraplex.platform.web.openapi import reference, streamed
from loraplex.platform.web.responses import documented


def generation_responses(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Build the responses of a route that generates text: the whole one, or with `stream` events with a chunk each."""
    last = "`[DONE]`, or `error` with an error object"
    success = streamed(whole, ("message", "error"), last, contentSchema=reference(chunk))
    return {200: success, **documented(422, 504)}
