"""Joins the items of a request into the messages of a conversation, as a chat template knows them.

Invariant: thought, text and calls that an assistant wrote in one go are one message again, so its prompt is found in the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal

from loraplex.platform.inference.truncation import INSTRUCTIONS, Cut, cuts_of
from loraplex.platform.parameters.chat_messages import ChatMessage
from loraplex.platform.parameters.responses_input import (
    CallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)

_EMPTY: Final = ChatMessage("assistant", "")


class Conversation:
    """The messages of a request. `open_thought`: (an item, its path in the body) -> its thought."""

    def __init__(self, instructions: str | None, open_thought: Callable[[ReasoningItem, str], str]) -> None:
        self.messages: list[ChatMessage] = []
        self._items_before: list[int] = []
        self._items = 0
        self._assistant: Literal["none", "thought", "text", "calls"] = "none"
        self._open_thought = open_thought
        if instructions:
            self._add(ChatMessage("system", instructions))

    def add(self, items: Sequence[InputItem], *, thoughts_from: int = 0) -> None:
        """Add the items of a request; thought before item `thoughts_from` is left out."""
        for index, item in enumerate(items):
            if isinstance(item, ReasoningItem):
                if index >= thoughts_from:
                    self._add_thought(self._open_thought(item, f"input[{index}]"))
            elif isinstance(item, CallOutputItem):
                self._add(ChatMessage("tool", item.output, tool_call_id=item.call_id))
            elif not isinstance(item, MessageItem):
                message = self._of_assistant("thought", "text", "calls")
                self.messages[-1] = replace(message, tool_calls=(*message.tool_calls, item.call()))
                self._assistant = "calls"
            elif item.role == "assistant":
                self.messages[-1] = replace(self._of_assistant("thought"), content=item.content)
                self._assistant = "text"
            else:
                self._add(ChatMessage(item.role, item.content))
            if not isinstance(item, MessageItem) or item.role not in INSTRUCTIONS:
                self._items += 1

    def cuts(self) -> tuple[Cut, ...]:
        """Return where the conversation may begin if it is too long."""
        return cuts_of(self.messages, self._items_before)

    def _add_thought(self, thought: str) -> None:
        if thought:
            message = self._of_assistant("thought")
            self.messages[-1] = replace(message, reasoning=message.reasoning + thought)
            self._assistant = "thought"

    def _of_assistant(self, *states: str) -> ChatMessage:
        """Return the last message if it is an assistant's in one of these states, else a new one."""
        if self._assistant not in states:
            self._add(_EMPTY)
        return self.messages[-1]

    def _add(self, message: ChatMessage) -> None:
        self._assistant = "none"
        self.messages.append(message)
        self._items_before.append(self._items)
