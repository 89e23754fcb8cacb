"""Messages of the Messages API (Anthropic): turns of a role, each with text or blocks, as models.

Invariant: a block that is not text, thought, a call or its result is refused by its index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.platform.parameters.chat_messages import MAX_MESSAGES
from loraplex.platform.parameters.request_object import ObjectOf, RequestObject
from loraplex.platform.parameters.value_errors import UNSUPPORTED, refused
from loraplex.platform.parameters.value_types import (
    AnyObject,
    AnyText,
    Boolean,
    Choice,
    Identifier,
    Kind,
    Text,
    bounded_list,
)

MAX_BLOCKS: Final = 4096
MAX_TOOL_NAME: Final = 128
ROLES: Final = ("user", "assistant", "system")
_ID: Final = Text(256)


class CacheControl(RequestObject):
    """A marker up to which the prompt may be cached. Every prompt is, so it changes only what `usage` calls tokens."""

    allowed: ClassVar[str] = '{"type": "ephemeral", "ttl"?: "5m" or "1h"}'
    type: Annotated[str, Choice(("ephemeral",))]
    ttl: Annotated[str | None, Choice(("5m", "1h"))] = None


MARKER: Final = ObjectOf(CacheControl)


class Block(RequestObject):
    """A part of a message. `tag`: its `type`."""

    tag: ClassVar[str]
    cache_control: Annotated[CacheControl | None, MARKER] = None


class TextBlock(Block):
    """Text."""

    allowed: ClassVar[str] = '{"type": "text", "text": …}'
    dropped: ClassVar[frozenset[str]] = frozenset({"citations", "parsed_output"})
    tag: ClassVar[str] = "text"
    type: Annotated[str, Choice(("text",))]
    text: Annotated[str, AnyText()]


class ToolReferenceBlock(Block):
    """The name of a tool that a search has found."""

    allowed: ClassVar[str] = '{"type": "tool_reference", "tool_name": …}'
    tag: ClassVar[str] = "tool_reference"
    type: Annotated[str, Choice(("tool_reference",))]
    tool_name: Annotated[str, Identifier(MAX_TOOL_NAME)]


class ThinkingBlock(Block):
    """The thought of an earlier answer. With a `signature`, what this seals counts, not `thinking`."""

    allowed: ClassVar[str] = '{"type": "thinking", "thinking": …, "signature": …}'
    tag: ClassVar[str] = "thinking"
    type: Annotated[str, Choice(("thinking",))]
    thinking: Annotated[str, AnyText()]
    signature: Annotated[str, AnyText()] = ""


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    allowed: ClassVar[str] = '{"type": "tool_use", "id": …, "name": …, "input": {…}}'
    dropped: ClassVar[frozenset[str]] = frozenset({"caller", "toolset_name"})
    tag: ClassVar[str] = "tool_use"
    type: Annotated[str, Choice(("tool_use",))]
    id: Annotated[str, _ID]
    name: Annotated[str, Identifier(MAX_TOOL_NAME)]
    input: Annotated[dict[str, Any], AnyObject()]


@dataclass(frozen=True)
class Blocks(Kind):
    """Text or at least `low` blocks of some types; a text is read as one block."""

    models: tuple[type[Block], ...]
    low: int = 0

    @property
    def allowed(self) -> str:
        return f"a string or a list of {self.low}..{MAX_BLOCKS} blocks of type {', '.join(self._by_tag)}"

    @cached_property
    def _by_tag(self) -> Mapping[str, type[Block]]:
        return {model.tag: model for model in self.models}

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = {tag: handler.generate_schema(model) for tag, model in self._by_tag.items()}
        documented = core_schema.tagged_union_schema(models, "type")
        item = core_schema.no_info_plain_validator_function(
            self._read_block, json_schema_input_schema=documented
        )
        listed = core_schema.list_schema(documented, min_length=self.low, max_length=MAX_BLOCKS)
        return core_schema.no_info_wrap_validator_function(
            self._read,
            bounded_list(item, self.low, MAX_BLOCKS, self.allowed),
            json_schema_input_schema=core_schema.union_schema([core_schema.str_schema(), listed]),
        )

    def _read(self, value: object, read_blocks: ValidatorFunctionWrapHandler) -> Sequence[Block]:
        return [_text(value)] if isinstance(value, str) else read_blocks(value)

    def _read_block(self, value: object) -> Block:
        tag = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(tag, str):
            raise refused("an object with `type`", value)
        if tag not in self._by_tag:
            message = f"is a block of type {tag[:64]!r}; only {', '.join(self._by_tag)} is supported here."
            raise PydanticCustomError(UNSUPPORTED, message)
        text = value.get("text")
        if tag == "text" and len(value) == 2 and isinstance(text, str):
            # As the model has it, at less than a tenth of the time: a body may have thousands of blocks.
            return _text(text)
        return self._by_tag[tag].check(value)


def _text(text: str) -> TextBlock:
    return TextBlock.model_construct({"type", "text"}, type="text", text=text)


PLAIN: Final = Blocks((TextBlock,))


class ToolResultBlock(Block):
    """The result of a call. `tool_use_id` is the `id` of a call of an earlier message."""

    allowed: ClassVar[str] = '{"type": "tool_result", "tool_use_id": …, "content"?: …, "is_error"?: …}'
    dropped: ClassVar[frozenset[str]] = frozenset({"toolset_name"})
    tag: ClassVar[str] = "tool_result"
    type: Annotated[str, Choice(("tool_result",))]
    tool_use_id: Annotated[str, _ID]
    content: Annotated[Sequence[Block], Blocks((TextBlock, ToolReferenceBlock))] = ()
    is_error: Annotated[bool, Boolean()] = False


class Turn(RequestObject):
    """A message: of `system`, instructions anywhere in the conversation. Successive ones of one role are one turn."""

    allowed: ClassVar[str] = "a message with role and content"
    role: Annotated[str, Choice(ROLES)]
    content: Annotated[Sequence[Block], Blocks((TextBlock,), 1)]


class UserTurn(Turn):
    """What a user says, after the results of the calls before."""

    content: Annotated[Sequence[Block], Blocks((TextBlock, ToolResultBlock), 1)]


class AssistantTurn(Turn):
    """An earlier answer, without blocks where the model ended at once. As the last message its text is continued."""

    content: Annotated[Sequence[Block], Blocks((TextBlock, ThinkingBlock, ToolUseBlock))]


_TURNS: Final[Mapping[str, type[Turn]]] = {"user": UserTurn, "assistant": AssistantTurn}
Turns: TypeAlias = Sequence[Turn]


@dataclass(frozen=True)
class Conversation(Kind):
    """The type of `messages`."""

    allowed = f"a list of 1..{MAX_MESSAGES} messages with `role` ({', '.join(ROLES)}) and `content` (string or blocks)"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = [handler.generate_schema(model) for model in (*_TURNS.values(), Turn)]
        item = core_schema.no_info_plain_validator_function(
            _read_turn, json_schema_input_schema=core_schema.union_schema([*models])
        )
        return bounded_list(item, 1, MAX_MESSAGES, self.allowed)


def _read_turn(value: object) -> Turn:
    if not isinstance(value, dict):
        raise refused("an object with `role` and `content`", value)
    role = value.get("role")
    # Of a role that is not known only the role is at fault.
    return _TURNS.get(str(role), Turn).check(value if role in ROLES else {"role": role})
