"""Small messages, tools and formats of a client."""

from collections.abc import Mapping
from typing import Any

from loraplex.platform.parameters.parameter_table import MODELS
from loraplex.platform.parameters.request_object import read_object

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def allowed_tools(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def tool(name: str = "f", **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def schema(**fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {**SCHEMA["json_schema"], **fields}}  # type: ignore[dict-item]


def read_parameters(endpoint: str, body: Mapping[str, object]) -> Any:
    """The checked body of an endpoint, by its name in the table."""
    return read_object(MODELS[endpoint], body)
