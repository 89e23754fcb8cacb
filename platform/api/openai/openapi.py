"""The request bodies in the OpenAPI document, generated from the parameter table."""

from typing import Any

from loraplex.platform.parameters.parameter_table import Endpoint, table


def body_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The `requestBody` of one operation."""
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
