"""The answers of the inference plane in the OpenAPI document: its statuses, and the two forms an answer may have."""

from typing import Any, Final

from loraplex.platform.api.management.responses import documented

_ANY: Final[dict[str, Any]] = {"schema": {}}
_STREAM: Final[dict[str, Any]] = {"schema": {"type": "string"}}
READING: Final = documented()
"""Of what reads names only."""
ANSWERING: Final = {
    200: {
        "description": "The whole answer, or with `stream` its events.",
        "content": {"application/json": _ANY, "text/event-stream": _STREAM},
    },
    **documented(422, 429, 504),
}
"""Of what an engine answers."""
