"""The bodies of `/v1/messages` and `/v1/messages/count_tokens` (Anthropic) as models: the only definition of their parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.engine.sampling_params import MAX_STOP_STRINGS
from loraplex.grammar.constraints import Tool
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.message_blocks import (
    MARKER,
    MAX_TOOL_NAME,
    PLAIN,
    Block,
    CacheControl,
    Conversation,
    ToolResultBlock,
    Turns,
)
from loraplex.platform.parameters.request_models import MAX_STOP_BYTES, MAX_TOKENS, ModelRequest
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject
from loraplex.platform.parameters.tools import DESCRIPTION, MAX_TOOLS
from loraplex.platform.parameters.unsupported_tools import MAX_TYPE, HostTool
from loraplex.platform.parameters.value_errors import INVALID
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Identifier,
    Integer,
    JsonSchemaObject,
    Kind,
    ListOf,
    Number,
    Refused,
    StopStrings,
    Text,
    bounded_list,
)

MAX_MARKERS: Final = 4
_ONLY_DIRECT: Final = ListOf(Choice(("direct",)), 1, 1, 'item: "direct"')
_FORMAT: Final = '{"type": "json_schema", "schema": …}'


class MessageTool(RequestObject):
    """A tool that the client runs, offered from the first turn on. `input_schema` is held while the call is written."""

    allowed: ClassVar[str] = "{name, input_schema, description?, strict?}"
    dropped: ClassVar[frozenset[str]] = frozenset(
        {"defer_loading", "eager_input_streaming", "input_examples"}
    )
    type: Annotated[str, Choice(("custom",))] = "custom"
    name: Annotated[str, Identifier(MAX_TOOL_NAME)]
    description: Annotated[str, DESCRIPTION] = ""
    input_schema: Annotated[dict[str, Any], JsonSchemaObject()]
    strict: Annotated[bool, Boolean()] = False
    allowed_callers: Annotated[list[str] | None, _ONLY_DIRECT] = None
    cache_control: Annotated[CacheControl | None, MARKER] = None

    def tool(self, place: str) -> Tool:
        """Return the tool that the model calls. `place`: its path in the body."""
        return Tool(self.name, self.description, self.input_schema, self.strict, f"{place}.input_schema")


@dataclass(frozen=True)
class MessageTools(Kind):
    """The type of `tools`. Those of Anthropic's host are told apart by their `type`."""

    allowed = f"a list of up to {MAX_TOOLS} objects {MessageTool.allowed}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        item = core_schema.no_info_plain_validator_function(
            _read_tool, json_schema_input_schema=handler.generate_schema(MessageTool)
        )
        return bounded_list(item, 0, MAX_TOOLS, self.allowed)


def _read_tool(value: object) -> MessageTool | HostTool:
    tag = value.get("type") if isinstance(value, dict) else None
    if isinstance(tag, str) and tag != "custom":
        return HostTool(tag[:MAX_TYPE])
    return MessageTool.check(value)


class MessageToolChoice(RequestObject):
    """Whether tools are called, and which."""

    allowed: ClassVar[str] = (
        '{"type": "auto", "any", "tool" or "none", "name"?, "disable_parallel_tool_use"?}'
    )
    type: Annotated[str, Choice(("auto", "any", "tool", "none"))]
    name: Annotated[str | None, Identifier(MAX_TOOL_NAME)] = None
    disable_parallel_tool_use: Annotated[bool, Boolean()] = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise PydanticCustomError(INVALID, 'must have a `name` with `type` "tool", and only then.')
        return self


class Thinking(RequestObject):
    """Whether the model thinks before it answers. `display` omitted: the thought is sent sealed only, as `signature`."""

    allowed: ClassVar[str] = (
        '{"type": "enabled", "budget_tokens": …}, or {"type": "adaptive", "between_tools" or "disabled"}, with `display`?'
    )
    type: Annotated[str, Choice(("disabled", "enabled", "adaptive", "between_tools"))]
    budget_tokens: Annotated[int | None, Integer(0, MAX_TOKENS)] = None
    display: Annotated[str | None, Choice(("summarized", "omitted"))] = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if (self.budget_tokens is None) == (self.type == "enabled"):
            raise PydanticCustomError(
                INVALID, 'must have `budget_tokens` with `type` "enabled", and only then.'
            )
        return self


class OutputSchema(RequestObject):
    """A JSON value that satisfies a schema; one that cannot be enforced is refused."""

    allowed: ClassVar[str] = _FORMAT
    type: Annotated[str, Choice(("json_schema",))]
    json_schema: Annotated[dict[str, Any], JsonSchemaObject()] = Field(alias="schema")


class OutputConfig(RequestObject):
    """`effort`: how much the model thinks, where it does."""

    allowed: ClassVar[str] = f'{{"effort"?: "low", "medium", "high", "xhigh" or "max", "format"?: {_FORMAT}}}'
    effort: Annotated[str | None, Choice(("low", "medium", "high", "xhigh", "max"))] = None
    format: Annotated[OutputSchema | None, ObjectOf(OutputSchema)] = None


class ThinkingEdit(RequestObject):
    """Keeps the thought of every earlier turn."""

    allowed: ClassVar[str] = '{"type": "clear_thinking_20251015", "keep": "all"}'
    type: Annotated[str, Choice(("clear_thinking_20251015",))]
    keep: Annotated[str, Choice(("all",))]


class ContextManagement(RequestObject):
    """What Claude Code sends, which changes nothing: no edit that would is offered."""

    allowed: ClassVar[str] = f'{{"edits": [{ThinkingEdit.allowed}]}}'
    edits: Annotated[Sequence[ThinkingEdit], ListOf(ThinkingEdit, 0, 1, ThinkingEdit.allowed)] = ()


class RequestMetadata(RequestObject):
    """`user_id` is any text that stands for the user, or for a session."""

    allowed: ClassVar[str] = '{"user_id"?: …}'
    user_id: Annotated[str | None, Text(512, min_bytes=0)] = None


class CountTokensRequest(ModelRequest):
    """The body of `/v1/messages/count_tokens`: what the prompt of `/v1/messages` consists of."""

    messages: Annotated[Turns, Conversation()] = Field(description="the conversation so far")
    system: Annotated[Sequence[Block], PLAIN] = Field((), description="instructions before the conversation")
    tools: Annotated[tuple[MessageTool | HostTool, ...], MessageTools()] = Field(
        (), description="functions the model may call"
    )
    tool_choice: Annotated[MessageToolChoice | None, ObjectOf(MessageToolChoice)] = Field(
        None, description="default auto with `tools`; a named tool is called once"
    )
    thinking: Annotated[Thinking | None, ObjectOf(Thinking)] = Field(
        None, description="default disabled; the budget is a part of `max_tokens`"
    )
    output_config: Annotated[OutputConfig | None, ObjectOf(OutputConfig)] = Field(
        None, description="effort of the thought, and format of the text"
    )
    cache_control: Annotated[CacheControl | None, MARKER] = Field(
        None,
        description="marks the whole prompt; there are at most 4 markers, with those of blocks and tools",
    )
    context_management: Annotated[ContextManagement | None, ObjectOf(ContextManagement)] = Field(
        None, description="nothing is edited"
    )

    @property
    def thinks(self) -> bool:
        """Whether thought is wanted; a budget of 0 is none."""
        wanted = self.thinking
        return wanted is not None and wanted.type != "disabled" and wanted.budget_tokens != 0

    @property
    def effort(self) -> str | None:
        """How much the model thinks where it does; None where that is left to the model."""
        return None if self.output_config is None else self.output_config.effort

    @property
    def has_markers(self) -> bool:
        """Whether the client marks what to cache."""
        return any(True for _ in self._markers())

    @model_validator(mode="after")
    def _check_markers(self) -> Self:
        if (number := sum(1 for _ in self._markers())) > MAX_MARKERS:
            raise InvalidParameter(
                f"`cache_control` occurs {number} times, but may occur at most {MAX_MARKERS} times.",
                param="cache_control",
            )
        return self

    def _markers(self) -> Iterator[CacheControl]:
        tools = (tool for tool in self.tools if isinstance(tool, MessageTool))
        blocks = [*self.system, *(block for turn in self.messages for block in turn.content)]
        inner = (each for block in blocks if isinstance(block, ToolResultBlock) for each in block.content)
        marked: tuple[CountTokensRequest | MessageTool | Block, ...] = (self, *tools, *blocks, *inner)
        return (each.cache_control for each in marked if each.cache_control is not None)


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Integer(1, MAX_TOKENS)] = Field(
        description="most tokens, with those of thought"
    )
    temperature: Annotated[float, Number(0, 2)] = Field(1.0, description="0 is greedy")
    top_p: Annotated[float, Number(0, 1)] = Field(1.0, description="nucleus sampling; 0 is greedy")
    top_k: Annotated[int, Integer(0, 2**20)] = Field(0, description="most likely tokens kept; 0 keeps all")
    stop_sequences: Annotated[tuple[str, ...], StopStrings(MAX_STOP_STRINGS, MAX_STOP_BYTES)] = Field(
        (), description='the text ends before the first of these strings; "" is none'
    )
    stream: Annotated[bool, Boolean()] = Field(False, description="send the response as server-sent events")
    metadata: Annotated[RequestMetadata | None, ObjectOf(RequestMetadata)] = Field(
        None, description="without `x-claude-code-session-id`, `user_id` names the session"
    )
    service_tier: Annotated[str | None, Choice(("auto", "standard_only"))] = Field(
        None, description="accepted; there is one tier"
    )
    thread: Annotated[None, Refused("no conversation is kept; send the whole one")] = Field(
        None, description="not offered"
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget > self.max_tokens:
            raise InvalidParameter(
                f"`thinking.budget_tokens` is {budget}, but must be at most `max_tokens`, {self.max_tokens}.",
                param="thinking.budget_tokens",
            )
        return self
