"""Reads the turns of a Messages body into chat messages: one for each turn, and one for each result of a call.

Invariant: each call has an id of its own, and each result belongs to one earlier call.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.parameters.chat_messages import ChatMessage, ToolCall
from loraplex.platform.parameters.message_blocks import (
    Block,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from loraplex.platform.parameters.messages_request import CountTokensRequest

Placed: TypeAlias = tuple[str, Block]
"""A block and its place in the body."""


class ConversationReader:
    """Reads one body."""

    def __init__(self, body: CountTokensRequest, seal: ThoughtSeal) -> None:
        self._body = body
        self._seal = seal
        self._called = set[str]()
        self._answered = set[str]()

    def read(self) -> list[ChatMessage]:
        """Return the conversation. Raises `InvalidParameter` for a wrong id, and for a thought that was not sealed here."""
        body = self._body
        turns = [("system", _placed("system", body.system))] if body.system else []
        turns += [
            (turn.role, _placed(f"messages[{index}].content", turn.content))
            for index, turn in enumerate(body.messages)
        ]
        messages: list[ChatMessage] = []
        for role, successive in groupby(turns, lambda turn: turn[0]):
            blocks = [each for _, each in successive]
            messages += self._assistant(blocks) if role == "assistant" else self._others(role, blocks)
        return messages

    def continues(self, last: ChatMessage) -> bool:
        """Return whether the model continues the text of the last message. Raises `InvalidParameter` where it cannot."""
        if last.role != "assistant":
            return False
        where = f"messages[{len(self._body.messages) - 1}]"
        if last.tool_calls or not last.content:
            message = (
                f"`{where}` is the last message of an assistant, which must be text that the model continues."
            )
            raise InvalidParameter(message, param=where)
        if self._body.thinks:
            message = f"`{where}` is text that the model continues, which needs `thinking` to be disabled."
            raise InvalidParameter(message, param=where)
        return True

    def _others(self, role: str, turns: Sequence[Sequence[Placed]]) -> Iterator[ChatMessage]:
        """Read a turn of user or system: its results come before its text."""
        for place, block in _flat(turns):
            if isinstance(block, ToolResultBlock):
                yield ChatMessage("tool", self._result(block), tool_call_id=self._answer(place, block))
        if any(isinstance(block, TextBlock) for _, block in _flat(turns)):
            yield ChatMessage(role, _text(turns))

    def _assistant(self, turns: Sequence[Sequence[Placed]]) -> Iterator[ChatMessage]:
        thoughts = "".join(self._thought(place, block) for place, block in _flat(turns))
        calls = [self._call(place, block) for place, block in _flat(turns) if isinstance(block, ToolUseBlock)]
        yield ChatMessage("assistant", _text(turns), tool_calls=tuple(calls), reasoning=thoughts)

    def _thought(self, place: str, block: Block) -> str:
        if not isinstance(block, ThinkingBlock):
            return ""
        if not block.signature:
            return block.thinking
        return self._seal.open(self._body.model, block.signature, f"{place}.signature")

    def _call(self, place: str, block: ToolUseBlock) -> ToolCall:
        if block.id in self._called:
            raise InvalidParameter(f"`{place}.id` is the `id` of an earlier call.", param=f"{place}.id")
        self._called.add(block.id)
        return ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))

    def _answer(self, place: str, block: ToolResultBlock) -> str:
        where = f"{place}.tool_use_id"
        if block.tool_use_id not in self._called:
            raise InvalidParameter(f"`{where}` is the `id` of no call of an earlier message.", param=where)
        if block.tool_use_id in self._answered:
            raise InvalidParameter(f"`{where}` names a call that has a result already.", param=where)
        self._answered.add(block.tool_use_id)
        return block.tool_use_id

    def _result(self, block: ToolResultBlock) -> str:
        names = [each.tool_name for each in block.content if isinstance(each, ToolReferenceBlock)]
        text = "".join(each.text for each in block.content if isinstance(each, TextBlock))
        text = "\n".join([*([text] if text else []), *names])
        return f"Error: {text}" if block.is_error else text


def _placed(place: str, blocks: Iterable[Block]) -> list[Placed]:
    return [(f"{place}[{index}]", block) for index, block in enumerate(blocks)]


def _flat(turns: Iterable[Iterable[Placed]]) -> Iterator[Placed]:
    return (placed for turn in turns for placed in turn)


def _text(turns: Iterable[Iterable[Placed]]) -> str:
    """Join the texts of a turn; successive turns of one role are paragraphs of one."""
    texts = ("".join(block.text for _, block in turn if isinstance(block, TextBlock)) for turn in turns)
    return "\n\n".join(filter(None, texts))
