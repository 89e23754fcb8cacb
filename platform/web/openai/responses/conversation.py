"""Joins the items of a request into the messages of a conversation, as a chat template knows them.

Invariant: thought, text and calls that an assistant wrote in one go are one message again, so its prompt is found in the cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from loraplex.platform.parameters.chat_messages import INSTRUCTIONS, ChatMessage
from loraplex.platform.parameters.responses_input import (
    CallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

_FOLLOWS: Final[Mapping[str, tuple[str, ...]]] = {
    "thought": ("thought",),
    "text": ("thought",),
    "call": ("thought", "text", "call"),
}
"""What each part of an assistant's message may stand behind in it."""


def read_items(
    instructions: str | None, items: Sequence[InputItem], thought_of: Callable[[int, ReasoningItem], str]
) -> tuple[list[ChatMessage], list[int]]:
    """Return the messages, and the items before each of them, without those of instructions. `thought_of`: (index, item) -> thought."""
    parts = [[ChatMessage("system", instructions)]] if instructions else []
    items_before, count, before = [0] * len(parts), 0, ""
    for index, item in enumerate(items):
        kind, part = _part(item, index, thought_of)
        if kind == "thought" and not part.reasoning:
            count += 1
            continue
        if before in _FOLLOWS.get(kind, ()):
            parts[-1].append(part)
        else:
            parts.append([part])
            items_before.append(count)
        before = kind
        count += part.role not in INSTRUCTIONS
    return [_joined(each) for each in parts], items_before


def _part(
    item: InputItem, index: int, thought_of: Callable[[int, ReasoningItem], str]
) -> tuple[str, ChatMessage]:
    if isinstance(item, ReasoningItem):
        return "thought", ChatMessage("assistant", "", reasoning=thought_of(index, item))
    if isinstance(item, CallOutputItem):
        return "result", ChatMessage("tool", item.output, tool_call_id=item.call_id)
    if isinstance(item, MessageItem):
        return "text" if item.role == "assistant" else item.role, ChatMessage(item.role, item.content)
    return "call", ChatMessage("assistant", "", tool_calls=(item.call(),))


def _joined(parts: Sequence[ChatMessage]) -> ChatMessage:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(chain.from_iterable(part.tool_calls for part in parts)),
    )
