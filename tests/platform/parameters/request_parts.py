"""Small messages, tools and formats of a client."""

from typing import Any

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
