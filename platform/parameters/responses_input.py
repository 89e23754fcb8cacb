"""`input` of the Responses API: a text, or items of a conversation with their calls, results and thought.

Invariant: a result follows the call that it answers, and no two calls or results share a `call_id`.
"""

import json
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.chat_messages import Content, TextPart, ToolCall
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.responses_tools import ToolName
from loraplex.platform.parameters.value_errors import UNSUPPORTED, refused
from loraplex.platform.parameters.value_types import (
    AnyText,
    Choice,
    Identifier,
    Kind,
    ListOf,
    Text,
    bounded_list,
)

ROLES: Final = ("user", "assistant", "system", "developer")
MAX_ITEMS: Final = 8192
MAX_THOUGHTS: Final = 128
_SHORT: Final = Text(max_bytes=256)
_TEXTS: Final = ("input_text", "output_text")
_THOUGHT: Final = '{"type": "reasoning_text", "text": …}'


class _Item(RequestObject):
    # Ids and states are those of earlier responses, or of the client's own making.
    dropped: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase", "caller", "async", "created_by"})


class ItemTextPart(TextPart):
    """A part of a message or a result."""

    allowed: ClassVar[str] = '{"type": "input_text" or "output_text", "text": …}'
    dropped: ClassVar[frozenset[str]] = TextPart.dropped | {"logprobs", "parsed"}
    type: Annotated[str, Choice(_TEXTS)]


_CONTENT: Final = Content(ItemTextPart, _TEXTS, least=0)


class MessageItem(_Item):
    """A message. `type` may be absent."""

    allowed: ClassVar[str] = '{"type"?: "message", role, content}'
    type: Annotated[str, Choice(("message",))] = "message"
    role: Annotated[str, Choice(ROLES)]
    content: Annotated[str, _CONTENT]


class _CallItem(_Item):
    call_id: Annotated[str, _SHORT]
    name: Annotated[str, Identifier()]
    namespace: Annotated[str | None, Identifier()] = None


class FunctionCallItem(_CallItem):
    """A call of a function that an earlier response has."""

    allowed: ClassVar[str] = '{"type": "function_call", call_id, name, arguments, namespace?}'
    dropped: ClassVar[frozenset[str]] = _Item.dropped | {"parsed_arguments"}
    type: Annotated[str, Choice(("function_call",))]
    arguments: Annotated[str, AnyText()]

    def call(self) -> ToolCall:
        """Return the call as the model wrote it."""
        return ToolCall(
            self.call_id, ToolName("function", self.name, self.namespace).call_name, self.arguments
        )


class CustomCallItem(_CallItem):
    """A call of a custom tool that an earlier response has."""

    allowed: ClassVar[str] = '{"type": "custom_tool_call", call_id, name, input, namespace?}'
    type: Annotated[str, Choice(("custom_tool_call",))]
    input: Annotated[str, AnyText()]

    def call(self) -> ToolCall:
        """Return the call as the model wrote it."""
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return ToolCall(self.call_id, ToolName("custom", self.name, self.namespace).call_name, arguments)


class CallOutputItem(_Item):
    """The result of a call of either type."""

    allowed: ClassVar[str] = '{"type": "function_call_output" or "custom_tool_call_output", call_id, output}'
    dropped: ClassVar[frozenset[str]] = _Item.dropped | {"name", "namespace"}
    type: Annotated[str, Choice(("function_call_output", "custom_tool_call_output"))]
    call_id: Annotated[str, _SHORT]
    output: Annotated[str, _CONTENT]


class ThoughtPart(RequestObject):
    """A part of an assistant's thought."""

    allowed: ClassVar[str] = _THOUGHT
    type: Annotated[str, Choice(("reasoning_text",))]
    text: Annotated[str, AnyText()]


class ReasoningItem(_Item):
    """The thought of an earlier response. Its seal counts before its text; a summary is not read."""

    allowed: ClassVar[str] = '{"type": "reasoning", content?, encrypted_content?, summary?}'
    dropped: ClassVar[frozenset[str]] = _Item.dropped | {"summary"}
    type: Annotated[str, Choice(("reasoning",))]
    content: Annotated[list[ThoughtPart], ListOf(ThoughtPart, 0, MAX_THOUGHTS, f"parts {_THOUGHT}")] = []  # noqa: RUF012 - frozen
    encrypted_content: Annotated[str | None, AnyText()] = None


InputItem: TypeAlias = MessageItem | FunctionCallItem | CustomCallItem | CallOutputItem | ReasoningItem
CALL_ITEMS: Final = (("function_call", FunctionCallItem), ("custom_tool_call", CustomCallItem))


@dataclass(frozen=True)
class InputItems(Kind):
    """The type of `input`. A text is one message of the user. `models`: of an item by its type, that of a message first."""

    models: tuple[tuple[str, type[InputItem]], ...] = (
        ("message", MessageItem),
        *CALL_ITEMS,
        ("function_call_output", CallOutputItem),
        ("custom_tool_call_output", CallOutputItem),
        ("reasoning", ReasoningItem),
    )

    @property
    def allowed(self) -> str:
        return f"a string, or a list of 1..{MAX_ITEMS} items, each {self._item}"

    @property
    def _item(self) -> str:
        *others, last = [kind for kind, _ in self.models[1:]]
        return f"a message with `role` and `content`, or an item of type {', '.join(others)} or {last}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = dict.fromkeys(model for _, model in self.models)
        documented = core_schema.union_schema([handler.generate_schema(model) for model in models])
        item = core_schema.no_info_plain_validator_function(
            self._read_item, json_schema_input_schema=documented
        )
        listed = core_schema.list_schema(documented, min_length=1, max_length=MAX_ITEMS)
        return core_schema.no_info_wrap_validator_function(
            self._read,
            bounded_list(item, 1, MAX_ITEMS, self.allowed),
            json_schema_input_schema=core_schema.union_schema([core_schema.str_schema(), listed]),
        )

    def _read(self, value: object, read_items: ValidatorFunctionWrapHandler) -> tuple[InputItem, ...]:
        if isinstance(value, str):
            return (MessageItem(role="user", content=value),)
        return _checked_calls(tuple(read_items(value)))

    def _read_item(self, value: object) -> InputItem:
        if not isinstance(value, dict):
            raise refused(self._item, value)
        kind = value.get("type")
        if kind is None:
            kind = "message" if "role" in value or "id" not in value else "item_reference"
        if not isinstance(kind, str):
            raise refused(self._item, value)
        for known, model in self.models:
            if kind == known:
                return model.check(value)
        if kind == "item_reference":
            raise PydanticCustomError(
                UNSUPPORTED,
                "refers to an item that is stored; nothing is stored here, so send the item itself.",
            )
        raise PydanticCustomError(
            UNSUPPORTED, f"is an item of type {kind[:64]!r}; each must be {self._item}."
        )


def _checked_calls(items: tuple[InputItem, ...]) -> tuple[InputItem, ...]:
    called: set[str] = set()
    answered: set[str] = set()
    for index, item in enumerate(items):
        if not isinstance(item, FunctionCallItem | CustomCallItem | CallOutputItem):
            continue
        where, is_result = f"input[{index}].call_id", isinstance(item, CallOutputItem)
        if is_result and item.call_id not in called:
            raise InvalidParameter(f"`{where}` is the `call_id` of no earlier call.", where)
        seen = answered if is_result else called
        if item.call_id in seen:
            kind = "result" if is_result else "call"
            raise InvalidParameter(f"`{where}` is the `call_id` of an earlier {kind}.", where)
        seen.add(item.call_id)
    return items
