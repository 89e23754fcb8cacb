"""`tools` and `tool_choice` of the Responses API: functions, custom tools, namespaces of both, and tools that only a host can run.

Invariant: every tool that may be called has a name of its own for the model, from which its namespace and name come back.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from loraplex.grammar.constraints import ContextFreeGrammar, Regex, Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.response_format import BOUNDS
from loraplex.platform.parameters.tools import DESCRIPTION, MAX_TOOLS, FunctionDefinition, Mode
from loraplex.platform.parameters.unsupported_tools import MAX_TYPE, HostTool, hosted_of
from loraplex.platform.parameters.value_errors import refused
from loraplex.platform.parameters.value_types import (
    MAX_IDENTIFIER,
    Choice,
    Identifier,
    Kind,
    ListOf,
    Text,
    bounded_list,
)

_DIGEST: Final = 8
_FUNCTION: Final = '{"type": "function", name, description?, parameters?, strict?}'
_CUSTOM: Final = '{"type": "custom", name, description?, format?}'
_FORMAT: Final = '{"type": "text"} or {"type": "grammar", "syntax": "lark" or "regex", "definition": …}'
_NAMESPACE: Final = '{"type": "namespace", name, description?, tools}'
_ONE: Final = '{"type": "function" or "custom", "name": …, "namespace"?: …}'
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
    """A tool as the client knows it."""

    kind: Literal["function", "custom"]
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
    """`names`: what the client calls each of `tools`, by the model's name. `hosted`: tools of a host, with their places in the body.
    `offered`: all others as they were read.
    """

    tools: tuple[Tool, ...] = ()
    names: Mapping[str, ToolName] = field(default_factory=dict)
    hosted: tuple[tuple[str, HostTool], ...] = ()
    offered: "Sequence[Member | Namespace]" = ()


class _Offered(RequestObject):
    # What only hosts of OpenAI, or clients, read.
    dropped: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "async", "cache_control", "defer_loading", "output_schema"}
    )
    name: Annotated[str, Identifier()]
    description: Annotated[str, DESCRIPTION] = ""


class ResponseFunction(_Offered, FunctionDefinition):
    """A function that the client carries out."""

    allowed: ClassVar[str] = _FUNCTION
    type: Annotated[Literal["function"], Choice(("function",))]


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


@dataclass(frozen=True, eq=False)
class OneOf(Kind):
    """An object of one of these models, by their types; with `hosted`, also a tool that a host runs."""

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
_MEMBER_LIST: Final = ListOf(OneOf(_MEMBERS), 1, MAX_TOOLS, "functions or custom tools")


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
        tool = OneOf({**_MEMBERS, "namespace": Namespace}, hosted=True)
        tools = bounded_list(tool.schema(handler), 0, MAX_TOOLS, self.allowed)
        return core_schema.no_info_after_validator_function(self._tool_set, tools)

    def _tool_set(self, offered: list[Member | Namespace | HostTool]) -> ToolSet:
        tools: dict[str, Tool] = {}
        names: dict[str, ToolName] = {}
        for place, name, tool in _flattened(offered):
            if tool.name in names:
                where = f"{place}.name"
                raise InvalidParameter(f"`{where}` makes {tool.name!r}, the name of an earlier tool.", where)
            tools[tool.name], names[tool.name] = tool, name
        if len(tools) > MAX_TOOLS:
            raise refused(self.allowed, [*tools])
        own = [each for each in offered if not isinstance(each, HostTool)]
        return ToolSet(tuple(tools.values()), names, hosted_of(offered, "tools"), own)


def _flattened(offered: list[Member | Namespace | HostTool]) -> Iterator[tuple[str, ToolName, Tool]]:
    """Yield (path in the body, name, tool) of all tools that may be called. A namespace's description stands before each member's."""
    for index, each in enumerate(offered):
        place = f"tools[{index}]"
        if isinstance(each, Namespace):
            for inner, member in enumerate(each.tools):
                name, inside = ToolName(member.type, member.name, each.name), f"{place}.tools[{inner}]"
                tool = member.tool(name.call_name, inside)
                about = "\n\n".join(filter(None, (each.description, tool.description)))
                yield inside, name, replace(tool, description=about)
        elif not isinstance(each, HostTool):
            name = ToolName(each.type, each.name)
            yield place, name, each.tool(name.call_name, place)


class ChosenTool(RequestObject):
    """One of `tools`, or of the tools of a namespace; in a list also all tools of one."""

    allowed: ClassVar[str] = _NAMED
    type: Annotated[Literal["function", "custom", "namespace"], Choice(("function", "custom", "namespace"))]
    name: Annotated[str, Identifier()]
    namespace: Annotated[str | None, Identifier()] = None

    def among(self, offered: ToolSet) -> list[str]:
        """Return the model's names of what is chosen. Raises `InvalidParameter` where nothing is."""
        if self.type == "namespace":
            names = [call_name for call_name, name in offered.names.items() if name.namespace == self.name]
        else:
            name = ToolName(self.type, self.name, self.namespace)
            names = [name.call_name] if offered.names.get(name.call_name) == name else []
        if not names:
            message = f"`tool_choice` names the {self.type} {self.name!r}, which is not in `tools`."
            raise InvalidParameter(message, param="tool_choice")
        return names


_CHOSEN: Final = OneOf(dict.fromkeys(("function", "custom", "namespace"), ChosenTool), hosted=True)


class ChosenTools(RequestObject):
    """Restricts the tools that may be called; the prompt contains all."""

    allowed: ClassVar[str] = _ALLOWED
    type: Annotated[str, Choice(("allowed_tools",))]
    mode: Annotated[Literal["auto", "required"], Choice(("auto", "required"))]
    tools: Annotated[list[ChosenTool | HostTool], ListOf(_CHOSEN, 1, MAX_TOOLS, f"objects {_NAMED}")]


_CHOICE: Final = OneOf(
    {"function": ChosenTool, "custom": ChosenTool, "allowed_tools": ChosenTools}, hosted=True
)
ResponseToolChoice: TypeAlias = Mode | ChosenTool | ChosenTools | HostTool


@dataclass(frozen=True)
class ResponseToolChoices(Kind):
    """The type of `tool_choice`."""

    allowed = f'"none", "auto", "required", {_ONE} or {_ALLOWED} with 1..{MAX_TOOLS} tools'

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        modes = core_schema.literal_schema(["none", "auto", "required"])
        documented = core_schema.union_schema([modes, _CHOICE.schema(handler)])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=documented)

    def _read(self, value: object) -> ResponseToolChoice:
        if value == "none" or value == "auto" or value == "required":
            return value
        if not isinstance(value, dict) or value.get("type") == "namespace":
            raise refused(self.allowed, value)
        chosen: ChosenTool | ChosenTools | HostTool = _CHOICE.read(value)
        return chosen
