"""`tools` and `tool_choice` of the Responses API: functions, custom tools, namespaces of both, and tools that only a host can run.

Invariant: every tool that may be called has a name of its own for the model, from which its namespace and name come back.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from loraplex.grammar.constraints import ContextFreeGrammar, Regex, Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.response_format import BOUNDS
from loraplex.platform.parameters.tools import DESCRIPTION, MAX_TOOLS, Mode
from loraplex.platform.parameters.unsupported_tools import MAX_TYPE, HostTool
from loraplex.platform.parameters.value_errors import refused
from loraplex.platform.parameters.value_types import (
    MAX_IDENTIFIER,
    Boolean,
    Choice,
    Identifier,
    JsonSchemaObject,
    Kind,
    ListOf,
    Text,
    bounded_list,
)

ToolKind: TypeAlias = Literal["function", "custom", "namespace"]

_DIGEST: Final = 8
_FUNCTION: Final = '{"type": "function", name, description?, parameters?, strict?}'
_CUSTOM: Final = '{"type": "custom", name, description?, format?}'
_FORMAT: Final = '{"type": "text"} or {"type": "grammar", "syntax": "lark" or "regex", "definition": …}'
_NAMESPACE: Final = '{"type": "namespace", name, description?, tools}'
_NAMED: Final = '{"type": "function", "custom" or "namespace", "name": …, "namespace"?: …}'
_ALLOWED: Final = '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [' + _NAMED + ", …]}"
_INPUT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
# Any object with a type: the tools of hosts are not known one by one.
_HOSTED: Final = core_schema.typed_dict_schema(
    {"type": core_schema.typed_dict_field(core_schema.str_schema())}, extra_behavior="allow"
)


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client knows it; of kind `namespace`, all tools of one."""

    kind: ToolKind
    name: str
    namespace: str | None = None

    @property
    def call_name(self) -> str:
        """The name by which the model calls it: one that is too long ends with a digest of all of it."""
        name = self.name if self.namespace is None else f"{self.namespace}__{self.name}"
        if len(name) <= MAX_IDENTIFIER:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
        return f"{name[: MAX_IDENTIFIER - _DIGEST - 1]}_{digest}"


@dataclass(frozen=True, slots=True)
class ToolSet:
    """`names`: what the client calls each of `tools`, by the model's name. `hosted`: tools of a host, with their places in the body."""

    tools: tuple[Tool, ...] = ()
    names: Mapping[str, ToolName] = field(default_factory=dict)
    hosted: tuple[tuple[str, HostTool], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`names`: the tools that may be called, None for all. `single`: only one call is allowed. `hosted`: as in `ToolSet`."""

    mode: Mode
    names: tuple[ToolName, ...] | None = None
    single: bool = False
    hosted: tuple[tuple[str, HostTool], ...] = ()


class _Offered(RequestObject):
    # What only hosts of OpenAI, or clients, read.
    dropped: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "async", "cache_control", "defer_loading", "output_schema"}
    )
    name: Annotated[str, Identifier()]
    description: Annotated[str, DESCRIPTION] = ""


class ResponseFunction(_Offered):
    """A function that the client carries out. `parameters` is the JSON schema of its arguments; without one it takes none."""

    allowed: ClassVar[str] = _FUNCTION
    type: Annotated[Literal["function"], Choice(("function",))]
    parameters: Annotated[dict[str, Any] | None, JsonSchemaObject()] = None
    strict: Annotated[bool, Boolean()] = False

    def tool(self, name: str, place: str) -> Tool:
        """Return the tool that the model calls by `name`. `place`: its path in the body."""
        parameters = self.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        return Tool(name, self.description, parameters, self.strict, f"{place}.parameters")


class InputFormat(RequestObject):
    """What the input of a custom tool may be: any text, or what a grammar allows."""

    allowed: ClassVar[str] = _FORMAT
    type: Annotated[str, Choice(("text", "grammar"))]
    syntax: Annotated[str | None, Choice(("lark", "regex"))] = None
    definition: Annotated[str | None, Text(BOUNDS.max_text_bytes)] = None

    def held(self, place: str) -> Regex | ContextFreeGrammar | None:
        """Return what holds the input while it is written. Raises `InvalidParameter` for a grammar that is not whole."""
        if self.type == "text" and self.syntax is self.definition is None:
            return None
        if self.type == "text" or self.syntax is None or self.definition is None:
            raise InvalidParameter(f"`{place}` must be {_FORMAT}.", param=place)
        if self.syntax == "lark":
            return ContextFreeGrammar(self.definition)
        if len(self.definition.encode()) > BOUNDS.max_pattern_bytes:
            text = f"`{place}.definition` must have at most {BOUNDS.max_pattern_bytes} bytes as a regex."
            raise InvalidParameter(text, param=f"{place}.definition")
        return Regex(self.definition)


class CustomTool(_Offered):
    """A tool of the client whose input is a text."""

    allowed: ClassVar[str] = _CUSTOM
    type: Annotated[Literal["custom"], Choice(("custom",))]
    format: InputFormat | None = None

    def tool(self, name: str, place: str) -> Tool:
        """Return the tool that the model calls by `name`, with the text as `input`. `place`: its path in the body."""
        held = None if self.format is None else self.format.held(f"{place}.format")
        return Tool(name, self.description, _INPUT, False, f"{place}.format.definition", held)


Member: TypeAlias = ResponseFunction | CustomTool


@dataclass(frozen=True)
class _OneTool(Kind):
    """A tool of these models, by their types; with `hosted`, also one that a host runs."""

    models: Mapping[str, type[RequestObject]]
    hosted: bool = False

    @property
    def allowed(self) -> str:
        return " or ".join(dict.fromkeys(model.allowed for model in self.models.values()))

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = [handler.generate_schema(model) for model in dict.fromkeys(self.models.values())]
        documented = core_schema.union_schema([*models, *([_HOSTED] if self.hosted else [])])
        return core_schema.no_info_plain_validator_function(self.read, json_schema_input_schema=documented)

    def read(self, value: object) -> Any:
        """Return a checked model or a `HostTool`."""
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in self.models:
            return self.models[kind].check(value)
        if not self.hosted or not isinstance(kind, str):
            raise refused(self.allowed, value)
        return HostTool(kind[:MAX_TYPE])


_MEMBERS: Final[Mapping[str, type[RequestObject]]] = {"function": ResponseFunction, "custom": CustomTool}
_MEMBER_LIST: Final = ListOf(_OneTool(_MEMBERS), 1, MAX_TOOLS, "functions or custom tools")


class Namespace(_Offered):
    """Functions and custom tools that belong together."""

    allowed: ClassVar[str] = _NAMESPACE
    type: Annotated[Literal["namespace"], Choice(("namespace",))]
    tools: Annotated[list[Member], _MEMBER_LIST]


@dataclass(frozen=True)
class ResponseTools(Kind):
    """The type of `tools`. Tools of other types are read as those of a host."""

    allowed = (
        f"a list of up to {MAX_TOOLS} tools {_FUNCTION}, {_CUSTOM} or {_NAMESPACE} with different names, "
        "those of namespaces included"
    )

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        tool = _OneTool({**_MEMBERS, "namespace": Namespace}, hosted=True)
        tools = bounded_list(tool.schema(handler), 0, MAX_TOOLS, self.allowed)
        return core_schema.no_info_after_validator_function(self._tool_set, tools)

    def _tool_set(self, offered: list[Member | Namespace | HostTool]) -> ToolSet:
        tools: dict[str, Tool] = {}
        names: dict[str, ToolName] = {}
        for place, name, each in _flattened(offered):
            call_name = name.call_name
            if call_name in names:
                where = f"{place}.name"
                raise InvalidParameter(f"`{where}` makes {call_name!r}, the name of an earlier tool.", where)
            tools[call_name], names[call_name] = each.tool(call_name, place), name
        if len(tools) > MAX_TOOLS:
            raise refused(self.allowed, [*tools])
        return ToolSet(tuple(tools.values()), names, hosted_of(offered, "tools"))


def hosted_of(tools: Sequence[object], place: str) -> tuple[tuple[str, HostTool], ...]:
    """Return those of the tools that a host runs, with their places in the body."""
    return tuple((f"{place}[{i}]", each) for i, each in enumerate(tools) if isinstance(each, HostTool))


def _flattened(offered: list[Member | Namespace | HostTool]) -> Iterator[tuple[str, ToolName, Member]]:
    """Yield (path in the body, name, tool) of all tools that may be called."""
    for index, each in enumerate(offered):
        place = f"tools[{index}]"
        if isinstance(each, Namespace):
            for inner, tool in enumerate(each.tools):
                yield f"{place}.tools[{inner}]", ToolName(tool.type, tool.name, each.name), tool
        elif not isinstance(each, HostTool):
            yield place, ToolName(each.type, each.name), each


class ChosenTool(RequestObject):
    """One of `tools`, or of the tools of a namespace, or all tools of one."""

    allowed: ClassVar[str] = _NAMED
    type: Annotated[ToolKind, Choice(("function", "custom", "namespace"))]
    name: Annotated[str, Identifier()]
    namespace: Annotated[str | None, Identifier()] = None

    def tool_name(self) -> ToolName:
        """Return the name as the rest of the gateway knows it."""
        return ToolName(self.type, self.name, self.namespace)


_CHOSEN: Final = _OneTool(dict.fromkeys(("function", "custom", "namespace"), ChosenTool), hosted=True)


class ChosenTools(RequestObject):
    """Restricts the tools that may be called; the prompt contains all."""

    allowed: ClassVar[str] = _ALLOWED
    type: Annotated[str, Choice(("allowed_tools",))]
    mode: Annotated[Literal["auto", "required"], Choice(("auto", "required"))]
    tools: Annotated[list[ChosenTool | HostTool], ListOf(_CHOSEN, 1, MAX_TOOLS, f"objects {_NAMED}")]


@dataclass(frozen=True)
class ResponseToolChoices(Kind):
    """The type of `tool_choice`."""

    allowed = f'"none", "auto", "required", {_NAMED} or {_ALLOWED} with 1..{MAX_TOOLS} tools'

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        modes = core_schema.literal_schema(["none", "auto", "required"])
        models = [handler.generate_schema(each) for each in (ChosenTool, ChosenTools)]
        documented = core_schema.union_schema([modes, *models, _HOSTED])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=documented)

    def _read(self, value: object) -> ToolSelection:
        if value == "none" or value == "auto" or value == "required":
            return ToolSelection(value)
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise refused(self.allowed, value)
        if value["type"] == "allowed_tools":
            choice = ChosenTools.check(value)
            names = tuple(each.tool_name() for each in choice.tools if isinstance(each, ChosenTool))
            return ToolSelection(choice.mode, names, hosted=hosted_of(choice.tools, "tool_choice.tools"))
        chosen = _CHOSEN.read(value)
        if isinstance(chosen, HostTool):
            return ToolSelection("required", (), hosted=(("tool_choice", chosen),))
        return ToolSelection("required", (chosen.tool_name(),), single=chosen.type != "namespace")
