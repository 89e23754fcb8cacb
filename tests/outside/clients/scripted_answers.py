"""The answers of a server that thinks of nothing: the tool that may be called, a document of the demanded schema, or a sentence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SENTENCE = "It is sunny in Rome."


@dataclass(frozen=True)
class Answer:
    """A text, or one call of the tool `name` with `text` as its arguments."""

    text: str
    name: str | None = None


def answer_to(body: Mapping[str, Any]) -> Answer:
    """The answer to a request for a chat completion.

    A tool is called where one may be and the last message is not already its result.
    """
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    choice = body.get("tool_choice", "auto")
    told = body["messages"][-1]["role"] == "tool"
    if isinstance(choice, dict) and "function" in choice:
        return _call(tools[choice["function"]["name"]])
    if tools and choice != "none" and (not told or choice == "required"):
        return _call(list(tools.values())[-1 if told else 0])
    schema = _schema_of(body.get("response_format") or {})
    return Answer(SENTENCE if schema is None else json.dumps(instance_of(schema, schema)))


def _schema_of(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schema of a response format, in each place where clients put it; none for a text."""
    if form.get("type") == "json_schema":
        schema: Mapping[str, Any] = form["json_schema"]["schema"]
        return schema
    return form.get("schema", form.get("value", {})) if form.get("type") == "json_object" else None


def _call(function: Mapping[str, Any]) -> Answer:
    schema = function.get("parameters") or {}
    return Answer(json.dumps(instance_of(schema, schema)), function["name"])


def instance_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A smallest instance of a plain schema: every property that it names, one item in each array."""
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return instance_of(target, root)
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return instance_of(schema[union][0], root)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    match schema.get("type", "object" if "properties" in schema else "null"):
        case "object":
            return {name: instance_of(each, root) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [instance_of(schema.get("items", {}), root)]
        case "string":
            return "Rome"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
    return None
