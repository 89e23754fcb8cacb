"""OpenAPI schemas of the inference plane: request bodies from the parameter table, statuses, JSON and event-stream responses."""

from typing import Any, Final

from loraplex.platform.api.management.responses import documented
from loraplex.platform.parameters.parameter_table import Endpoint, table

_ANY: Final[dict[str, Any]] = {"schema": {}}
_STREAM: Final[dict[str, Any]] = {"schema": {"type": "string"}}
LOOKUP_RESPONSES: Final = documented()
"""Responses of routes that use no engine."""
GENERATION_RESPONSES: Final = {
    200: {
        "description": "The whole response, or with `stream` its events.",
        "content": {"application/json": _ANY, "text/event-stream": _STREAM},
    },
    **documented(422, 504),
}
"""Responses of routes that generate text."""


def body_schema(endpoint: Endpoint) -> dict[str, Any]:
    """Build the `requestBody` of one operation."""
    rows = table(endpoint)
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": [row.name for row in rows.values() if endpoint in row.required],
        "properties": {
            row.name: {"description": f"{row.meaning}. Must be {row.kind.allowed}."} for row in rows.values()
        },
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
