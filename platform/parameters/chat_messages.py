"""Chat messages: role, plain text, the calls of an assistant and the results of tools (OpenAI chat API).

Parts that are not text are refused by name. What clients return from an earlier response is accepted and dropped, but for the
thought of an assistant, which a chat template may read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from pydantic import GetCoreSchemaHandler, ValidationInfo, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.value_errors import INVALID, UNSUPPORTED, refused
from loraplex.platform.parameters.value_types import (
    AnyText,
    Choice,
    Identifier,
    Kind,
    ListOf,
    Refused,
    Text,
    bounded_list,
)

INSTRUCTIONS: Final = ("system", "developer")
ROLES: Final = (*INSTRUCTIONS, "user", "assistant", "tool")
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 4096
MAX_CALLS: Final = 128
_MESSAGE: Final = "a message with role, content, name, tool_calls, tool_call_id"
_CALL: Final = '{"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
_PART: Final = '{"type": "text", "text": …}'
_SHORT: Final = Text(max_bytes=256)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of an assistant. `arguments` is its text: a JSON object unless it was truncated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Text parts are joined; an assistant's content may be empty. `reasoning`: its thought, apart from the content."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class _OtherRole(Kind):
    """A field of another role: null is accepted."""

    owner: str

    allowed = "null"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._refuse, json_schema_input_schema=core_schema.none_schema()
        )

    def _refuse(self, value: object, info: ValidationInfo) -> None:
        raise PydanticCustomError(
            INVALID, f"belongs to a message of role {self.owner}, not {info.data['role']}."
        )


class TextPart(RequestObject):
    """A part of a message's content. Other types of parts are not supported."""

    allowed: ClassVar[str] = _PART
    dropped: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations"})
    type: Annotated[str, Choice(("text",))]
    text: Annotated[str, AnyText()]


class RefusalPart(RequestObject):
    """A part of a message's content that says why an assistant did not answer. It is dropped."""

    allowed: ClassVar[str] = '{"type": "refusal", "refusal": …}'
    type: Annotated[str, Choice(("refusal",))]
    refusal: Annotated[str, AnyText()]


@dataclass(frozen=True)
class Content(Kind):
    """Text, or at least `least` text parts, joined by `between`. `part`: the model of a part, which has one of `types`."""

    part: type[TextPart] = TextPart
    types: tuple[str, ...] = ("text",)
    least: int = 1
    between: str = ""

    @property
    def allowed(self) -> str:
        return f"a string or a list of {self.least}..{MAX_PARTS} text parts"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        part = core_schema.union_schema([handler.generate_schema(each) for each in self._part_models()])
        read = core_schema.no_info_plain_validator_function(self._read_part)
        parts = bounded_list(read, self.least, MAX_PARTS, self.allowed)
        listed = core_schema.list_schema(part, min_length=self.least, max_length=MAX_PARTS)
        return core_schema.no_info_wrap_validator_function(
            self._read,
            parts,
            json_schema_input_schema=core_schema.union_schema([core_schema.str_schema(), listed]),
        )

    def _part_models(self) -> tuple[type[RequestObject], ...]:
        return self.part, RefusalPart

    def _read(self, value: object, read_parts: ValidatorFunctionWrapHandler) -> str:
        return value if isinstance(value, str) else self.between.join(read_parts(value))

    def _read_part(self, value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str):
            raise refused(f"an object {self.part.allowed}", value)
        if kind == "refusal":
            RefusalPart.check(value)
            return ""
        if kind not in self.types:
            raise PydanticCustomError(
                UNSUPPORTED, f"is a part of type {kind[:64]!r}; only text is supported."
            )
        text = value.get("text")
        if len(value) == 2 and isinstance(text, str):
            # As the model has it, at less than a tenth of the time: a body may have 40,000 parts.
            return text
        return self.part.check(value).text


class MessageFunction(RequestObject):
    """The function of a call. `arguments` is the text of a JSON object, unless it was truncated."""

    allowed: ClassVar[str] = _CALL
    dropped: ClassVar[frozenset[str]] = frozenset({"parsed_arguments", "provider_specific_fields"})
    name: Annotated[str, Identifier()]
    arguments: Annotated[str, AnyText()]


class MessageToolCall(RequestObject):
    """A call of an assistant's message. `index` is what an accumulated stream leaves, `extra_content` what the `ai` package adds."""

    allowed: ClassVar[str] = _CALL
    dropped: ClassVar[frozenset[str]] = frozenset(
        {"index", "provider_specific_fields", "extra_content", "cache_control"}
    )
    type: Annotated[str, Choice(("function",))]
    id: Annotated[str, _SHORT]
    function: MessageFunction

    def tool_call(self) -> ToolCall:
        """Return the call as the rest of the gateway knows it."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


_TEXT_ONLY: Final = Refused("messages contain text only")


_CALLS: Final = ListOf(MessageToolCall, 0, MAX_CALLS, f"calls {_CALL}")


class _Message(RequestObject):
    allowed: ClassVar[str] = _MESSAGE
    # The `openai` client adds the first two to responses, litellm the others.
    dropped: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "parsed", "provider_specific_fields", "cache_control"}
    )
    role: Annotated[str, Choice(ROLES)]
    content: Annotated[str, Content()]
    name: Annotated[str | None, _SHORT] = None
    tool_calls: Annotated[Sequence[MessageToolCall], _OtherRole("assistant")] = ()
    tool_call_id: Annotated[str | None, _OtherRole("tool")] = None
    function_call: Annotated[None, _TEXT_ONLY] = None
    audio: Annotated[None, _TEXT_ONLY] = None

    def chat_message(self) -> ChatMessage:
        """Return the message as the rest of the gateway knows it."""
        calls = tuple(map(MessageToolCall.tool_call, self.tool_calls))
        return ChatMessage(self.role, self.content, self.name, self.tool_call_id, calls)


class TextMessage(_Message):
    """A message of the application or its user."""

    role: Annotated[str, Choice(("system", "developer", "user"))]


class AssistantMessage(_Message):
    """An earlier response. Its content may be null or absent, also without calls."""

    role: Annotated[str, Choice(("assistant",))]
    # The last two are of litellm, `reasoning_details` of OpenRouter.
    dropped: ClassVar[frozenset[str]] = _Message.dropped | {
        *("refusal", "reasoning_details", "thinking_blocks", "images")
    }
    content: Annotated[str, Content()] = ""
    tool_calls: Annotated[Sequence[MessageToolCall], _CALLS] = ()
    reasoning_content: Annotated[str, AnyText()] = ""
    reasoning: Annotated[str, AnyText()] = ""

    def chat_message(self) -> ChatMessage:
        message, thought = super().chat_message(), self.reasoning_content or self.reasoning
        return replace(message, reasoning=thought) if thought else message


class ToolMessage(_Message):
    """The result of a call. `tool_call_id` is the `id` of a call of an earlier message."""

    role: Annotated[str, Choice(("tool",))]
    tool_call_id: Annotated[str, _SHORT]


_MODELS: Final[Mapping[str, type[_Message]]] = {
    **dict.fromkeys(("system", "developer", "user"), TextMessage),
    "assistant": AssistantMessage,
    "tool": ToolMessage,
}


@dataclass(frozen=True)
class Messages(Kind):
    """The type of `messages`."""

    allowed = (
        f"a list of 1..{MAX_MESSAGES} messages with `role` ({', '.join(ROLES)}) and `content` (string or text parts); "
        f"an assistant may have up to {MAX_CALLS} `tool_calls`, a tool has the `tool_call_id` of one"
    )

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = {role: handler.generate_schema(model) for role, model in _MODELS.items()}
        documented = core_schema.tagged_union_schema(models, "role")
        item = core_schema.no_info_plain_validator_function(
            _read_message, json_schema_input_schema=documented
        )
        messages = bounded_list(item, 1, MAX_MESSAGES, self.allowed)
        return core_schema.no_info_after_validator_function(_check_results, messages)


def _read_message(value: object) -> ChatMessage:
    if not isinstance(value, dict):
        raise refused("an object with `role` and `content`", value)
    role = value.get("role")
    if isinstance(role, str) and role in _MODELS:
        return _MODELS[role].check(value).chat_message()
    # Only the role is at fault: which other fields a message may have depends on it.
    return _Message.check({"role": role}).chat_message()


def _check_results(messages: list[ChatMessage]) -> list[ChatMessage]:
    called = set[str]()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            where = f"messages[{index}].tool_call_id"
            raise InvalidParameter(
                f"`{where}` is the `id` of no call of an earlier assistant message.", param=where
            )
    return messages
