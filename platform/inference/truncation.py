"""Leaves out the oldest turns of a conversation that the context is too short for.

Invariant: what stays has every call of its results, all instructions, and the newest turn whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeVar

from loraplex.platform.errors import ContextTooLong
from loraplex.platform.parameters.chat_messages import INSTRUCTIONS, ChatMessage
from loraplex.platform.parameters.request_models import ChatRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cut:
    """A place where a conversation may begin: at message `start`, without `items` of the client's items."""

    start: int
    items: int


class ConversationRequest(ChatRequest):
    """A chat of a dialect. `cuts`: where it may begin if it is too long, oldest first. `on_cut` is told how many items are left out."""

    cuts: tuple[Cut, ...] = ()
    on_cut: Callable[[int], None] | None = None

    def begun_at(self, start: int) -> Self:
        """Return the request without the messages before `start`, but for instructions."""
        kept = [message for message in self.messages[:start] if message.role in INSTRUCTIONS]
        return self.model_copy(update={"messages": kept + self.messages[start:], "cuts": ()})


def cuts_of(messages: list[ChatMessage], items_before: list[int]) -> tuple[Cut, ...]:
    """Return every place where the conversation may begin. `items_before`: the client's items before each message, without those of
    instructions.

    A turn begins with a message of the user that follows another role's.
    """
    cuts: list[Cut] = []
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    awaited: set[str | None] = set()
    previous = None
    for index, message in enumerate(messages):
        if message.role == "user" and previous not in ("user", None) and not awaited:
            cuts.append(Cut(index, items_before[index]))
        awaited.discard(message.tool_call_id)
        awaited.update(call.id for call in message.tool_calls if call.id in answered)
        if message.role not in INSTRUCTIONS:
            previous = message.role
    return tuple(cuts)


def fitted(request: ConversationRequest, encode: Callable[[ConversationRequest, int], T], spare: int) -> T:
    """Return what `encode` makes of as much of the conversation as fits beside `spare` tokens: all, or fewer turns.

    `encode`: (request, spare); raises `ContextTooLong` for what does not fit. It is called O(log turns) times. The newest turn needs
    no spare tokens; raises `ContextTooLong` where even that is too long.
    """
    try:
        return encode(request.begun_at(0), spare)
    except ContextTooLong:
        low, high = 0, len(request.cuts) - 1
    best = encode(request.begun_at(request.cuts[high].start), 0)
    while low < high:
        middle = (low + high) // 2
        try:
            best = encode(request.begun_at(request.cuts[middle].start), spare)
        except ContextTooLong:
            low = middle + 1
        else:
            high = middle
    if request.on_cut is not None:
        request.on_cut(request.cuts[high].items)
    return best
