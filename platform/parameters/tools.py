"""Parses `tools` and `tool_choice`: the functions that a model may call, and those that it must call (OpenAI API)."""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from loraplex.grammar.constraints import JsonSchemaValue, Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Identifier,
    Text,
    closed_fields,
    needed,
    refuse,
)

Mode: TypeAlias = Literal["none", "auto", "required"]

MAX_TOOLS: Final = 128
MAX_DESCRIPTION_BYTES: Final = 65_536
_FUNCTION: Final = '{"type": "function", "function": {name, description?, parameters?, strict?}}'
_NAMED: Final = '{"type": "function", "function": {"name": …}}'
_ALLOWED_TOOLS: Final = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [' + _NAMED + ", …]}}"
)
_TYPE: Final = Choice(("function",))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names`: the tools that may be called, None for all. `single`: only one call is allowed."""

    mode: Mode
    names: tuple[str, ...] | None = None
    single: bool = False


@dataclass(frozen=True, slots=True)
class ToolDefinitions:
    """The type of `tools`."""

    max_items: int = MAX_TOOLS

    @property
    def allowed(self) -> str:
        return f"a list of up to {self.max_items} objects {_FUNCTION} with different names"

    def read(self, name: str, value: object) -> tuple[Tool, ...]:
        if not isinstance(value, list) or len(value) > self.max_items:
            refuse(name, value, self.allowed)
        tools = tuple(_tool(f"{name}[{index}]", each) for index, each in enumerate(value))
        seen = set[str]()
        for index, tool in enumerate(tools):
            if tool.name in seen:
                where = f"{name}[{index}].function.name"
                raise InvalidParameter(
                    f"`{where}` is {tool.name!r}, the name of an earlier tool.", param=where
                )
            seen.add(tool.name)
        return tools


@dataclass(frozen=True, slots=True)
class ToolChoices:
    """The type of `tool_choice`."""

    max_items: int = MAX_TOOLS

    @property
    def allowed(self) -> str:
        return f'"none", "auto", "required", {_NAMED} or {_ALLOWED_TOOLS} with 1..{self.max_items} tools'

    def read(self, name: str, value: object) -> ToolChoice:
        if value == "none" or value == "auto" or value == "required":
            return ToolChoice(value)
        if not isinstance(value, dict):
            refuse(name, value, self.allowed)
        if value.get("type") != "allowed_tools":
            return ToolChoice("required", (_named(name, value),), single=True)
        fields = closed_fields(name, value, ("type", "allowed_tools"), _ALLOWED_TOOLS)
        return self._allowed_tools(f"{name}.allowed_tools", needed(fields, name, "allowed_tools"))

    def _allowed_tools(self, name: str, value: object) -> ToolChoice:
        fields = closed_fields(name, value, ("mode", "tools"), _ALLOWED_TOOLS)
        mode = needed(fields, name, "mode")
        tools = needed(fields, name, "tools")
        if mode != "auto" and mode != "required":
            refuse(f"{name}.mode", mode, '"auto" or "required"')
        if not isinstance(tools, list) or not 1 <= len(tools) <= self.max_items:
            refuse(f"{name}.tools", tools, f"a list of 1..{self.max_items} objects {_NAMED}")
        names = [_named(f"{name}.tools[{index}]", each) for index, each in enumerate(tools)]
        return ToolChoice(mode, tuple(dict.fromkeys(names)))


def _tool(name: str, value: object) -> Tool:
    fields = closed_fields(name, value, ("type", "function"), _FUNCTION)
    _TYPE.read(f"{name}.type", needed(fields, name, "type"))
    path = f"{name}.function"
    names = ("name", "description", "parameters", "strict")
    function = closed_fields(path, needed(fields, name, "function"), names, _FUNCTION)
    description = Text(MAX_DESCRIPTION_BYTES, min_bytes=0)
    return Tool(
        name=Identifier().read(f"{path}.name", needed(function, path, "name")),
        description=description.read(f"{path}.description", function.get("description", "")),
        parameters=_parameters(f"{path}.parameters", function.get("parameters")),
        strict=Boolean().read(f"{path}.strict", function.get("strict", False)),
        param=f"{path}.parameters",
    )


def _parameters(name: str, value: object) -> JsonSchemaValue:
    """Parse the parameters of a function; without a schema it takes no arguments."""
    if value is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(value, dict):
        refuse(name, value, "a JSON schema as an object")
    schema: dict[str, Any] = value
    return schema


def _named(name: str, value: object) -> str:
    fields = closed_fields(name, value, ("type", "function"), _NAMED)
    _TYPE.read(f"{name}.type", needed(fields, name, "type"))
    path = f"{name}.function"
    function = closed_fields(path, needed(fields, name, "function"), ("name",), _NAMED)
    return Identifier().read(f"{path}.name", needed(function, path, "name"))
