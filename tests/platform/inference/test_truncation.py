"""Cuts of conversations: whole turns, calls with their results, and the fewest turns left out."""

import random
from typing import Any

import pytest

from loraplex.platform.errors import ContextTooLong
from loraplex.platform.inference.truncation import ConversationRequest, Cut, cuts_of, fitted
from loraplex.platform.parameters.chat_messages import ChatMessage, ToolCall


def message(role: str, *calls: str, answers: str | None = None) -> ChatMessage:
    return ChatMessage(role, role, None, answers, tuple(ToolCall(each, "f", "{}") for each in calls))


def starts(*messages: ChatMessage) -> list[int]:
    return [cut.start for cut in cuts_of(list(messages), list(range(len(messages))))]


def test_turns_begin_with_the_user() -> None:
    user, answer, rules = message("user"), message("assistant"), message("system")
    assert starts(user) == starts(rules, user) == starts(user, user, answer) == []
    assert starts(rules, user, answer, user, user, answer, user) == [3, 6]
    assert starts(user, answer, rules, user) == [3]
    # Instructions between messages of the user begin no turn.
    assert starts(user, rules, user) == []


def test_calls_stay_with_their_results() -> None:
    user, late = message("user"), message("tool", answers="a")
    assert starts(user, message("assistant", "a"), user, late, user) == [4]
    assert starts(user, message("assistant", "a"), user) == [2]
    both = message("assistant", "a", "b")
    assert starts(user, both, late, user, message("tool", answers="b"), user) == [5]


def conversation(turns: int, cuts: tuple[Cut, ...], told: list[int]) -> ConversationRequest:
    values: dict[str, Any] = {"messages": [message("system"), *[message("user")] * turns]}
    return ConversationRequest.model_construct({"messages"}, **values, cuts=cuts, on_cut=told.append)


def test_the_fewest_turns_are_left_out() -> None:
    seed = random.Random(1)
    for _ in range(300):
        turns, room = seed.randint(2, 60), seed.randint(2, 61)
        told: list[int] = []
        sizes: list[int] = []

        def encode(
            request: ConversationRequest, spare: int, room: int = room, sizes: list[int] = sizes
        ) -> int:
            sizes.append(len(request.messages))
            if len(request.messages) + spare > room:
                raise ContextTooLong("too long", "messages")
            return len(request.messages)

        cuts = tuple(Cut(1 + turn, turn) for turn in range(1, turns))
        spare = seed.randint(0, 3)
        # The newest turn, which is 2 messages with the instructions, needs no spare room.
        fits = max(2, min(turns + 1, room - spare))
        assert fitted(conversation(turns, cuts, told), encode, spare) == fits
        assert told == ([turns + 1 - fits] if fits < turns + 1 else [])
        assert len(sizes) <= 2 + turns.bit_length()


def test_the_newest_turn_is_never_cut() -> None:
    def refuse(_: ConversationRequest, spare: int) -> None:
        raise ContextTooLong("too long", "messages")

    told: list[int] = []
    with pytest.raises(ContextTooLong):
        fitted(conversation(3, (Cut(2, 1), Cut(3, 2)), told), refuse, 0)
    assert told == []


def test_instructions_stay() -> None:
    messages = [
        message("system"),
        message("user"),
        message("developer"),
        message("assistant"),
        message("user"),
    ]
    request = ConversationRequest.model_construct({"messages"}, messages=messages)
    assert [each.role for each in request.begun_at(4).messages] == ["system", "developer", "user"]
    assert request.begun_at(0).messages == messages
