"""OpenAPI schemas of the Messages API: bodies, responses, events and errors."""

from typing import Any, Final

from pydantic import BaseModel

from loraplex.platform.web.anthropic.response_models import MessageErrorDocument
from loraplex.platform.web.openapi import json_text, streamed
from loraplex.platform.web.responses import EVERYWHERE

EVENTS: Final = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
    *("message_delta", "message_stop", "ping", "error"),
)


def responses(whole: type[BaseModel], *, streams: bool) -> dict[int | str, dict[str, Any]]:
    """Build the responses of a route, with errors in Anthropic's shape. `streams`: with `stream` it sends events."""
    success = (
        streamed(whole, EVENTS, "`message_stop` or `error`", json_text()) if streams else {"model": whole}
    )
    failures = (*EVERYWHERE, 422, 504) if streams else EVERYWHERE
    return {200: success, **{status: {"model": MessageErrorDocument} for status in failures}}
