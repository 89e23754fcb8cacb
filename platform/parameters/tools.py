"""`tools` and `tool_choice`: the functions that a model may call, and those that it must call (OpenAI API)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from loraplex.grammar.constraints import Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.value_errors import refused
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Identifier,
    JsonSchemaObject,
    Kind,
    ListOf,
    Text,
    bounded_list,
)

Mode: TypeAlias = Literal["none", "auto", "required"]

MAX_TOOLS: Final = 128
MAX_DESCRIPTION_BYTES: Final = 65_536
DESCRIPTION: Final = Text(MAX_DESCRIPTION_BYTES, min_bytes=0)
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


class FunctionDefinition(RequestObject):
    """A function. `parameters` is the JSON schema of its arguments; without one it takes none."""

    allowed: ClassVar[str] = _FUNCTION
    dropped: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    name: Annotated[str, Identifier()]
    description: Annotated[str, DESCRIPTION] = ""
    parameters: Annotated[dict[str, Any] | None, JsonSchemaObject()] = None
    strict: Annotated[bool, Boolean()] = False

    def tool(self, name: str, place: str) -> Tool:
        """Return the tool that the model calls by `name`. `place`: its path in the body."""
        parameters = self.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        return Tool(name, self.description, parameters, self.strict, f"{place}.parameters")


class ToolDefinition(RequestObject):
    """A tool that the model may call."""

    allowed: ClassVar[str] = _FUNCTION
    dropped: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    type: Annotated[str, _TYPE]
    function: FunctionDefinition


class FunctionName(RequestObject):
    """The name of a function in `tools`."""

    allowed: ClassVar[str] = _NAMED
    name: Annotated[str, Identifier()]


class NamedTool(RequestObject):
    """One of `tools`."""

    allowed: ClassVar[str] = _NAMED
    type: Annotated[str, _TYPE]
    function: FunctionName


class AllowedTools(RequestObject):
    """Those of `tools` that may be called."""

    allowed: ClassVar[str] = _ALLOWED_TOOLS
    mode: Annotated[Literal["auto", "required"], Choice(("auto", "required"))]
    tools: Annotated[list[NamedTool], ListOf(NamedTool, 1, MAX_TOOLS, f"objects {_NAMED}")]


class AllowedToolsChoice(RequestObject):
    """Restricts the tools that may be called; the prompt contains all."""

    allowed: ClassVar[str] = _ALLOWED_TOOLS
    type: Annotated[str, Choice(("allowed_tools",))]
    allowed_tools: AllowedTools


@dataclass(frozen=True)
class ToolDefinitions(Kind):
    """The type of `tools`."""

    allowed = f"a list of up to {MAX_TOOLS} objects {_FUNCTION} with different names"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        tools = bounded_list(handler.generate_schema(ToolDefinition), 0, MAX_TOOLS, self.allowed)
        return core_schema.no_info_after_validator_function(_read_tools, tools)


@dataclass(frozen=True)
class ToolChoices(Kind):
    """The type of `tool_choice`."""

    allowed = f'"none", "auto", "required", {_NAMED} or {_ALLOWED_TOOLS} with 1..{MAX_TOOLS} tools'

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = {"function": NamedTool, "allowed_tools": AllowedToolsChoice}
        objects = {kind: handler.generate_schema(model) for kind, model in models.items()}
        modes = core_schema.literal_schema(list(get_args(Mode)))
        documented = core_schema.union_schema([modes, core_schema.tagged_union_schema(objects, "type")])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=documented)

    def _read(self, value: object) -> ToolChoice:
        if value == "none" or value == "auto" or value == "required":
            return ToolChoice(value)
        if not isinstance(value, dict):
            raise refused(self.allowed, value)
        if value.get("type") != "allowed_tools":
            named = NamedTool.check(value)
            return ToolChoice("required", (named.function.name,), single=True)
        choice = AllowedToolsChoice.check(value)
        names = dict.fromkeys(each.function.name for each in choice.allowed_tools.tools)
        return ToolChoice(choice.allowed_tools.mode, tuple(names))


def differently_named(placed: Iterable[tuple[str, Tool]]) -> tuple[Tool, ...]:
    """Return the tools, each given with the object in the body that has its name. Raises `InvalidParameter` for a second of one name."""
    tools: dict[str, Tool] = {}
    for place, tool in placed:
        if tool.name in tools:
            where = f"{place}.name"
            raise InvalidParameter(f"`{where}` is {tool.name!r}, the name of an earlier tool.", param=where)
        tools[tool.name] = tool
    return tuple(tools.values())


def _read_tools(definitions: list[ToolDefinition]) -> tuple[Tool, ...]:
    placed = ((f"tools[{index}].function", each.function) for index, each in enumerate(definitions))
    return differently_named((place, function.tool(function.name, place)) for place, function in placed)
