"""The deltas that a parser makes of output text: thought, content and tool calls.

Invariant: joined, the deltas of one text are the same however the text was split.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

EngineReason: TypeAlias = Literal["stop", "length"]
AnswerReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the message, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the thought before the answer, never empty, without its markers. No thought follows other deltas."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call whose name is complete. `index` counts the calls of one choice from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More text of the arguments of call `index`, never empty; joined, the deltas are one JSON object as it was
    written.
    """

    index: int
    text: str


OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta


class JoinedOutput(NamedTuple):
    """The text of a choice: its thought, its content, and each call with its arguments."""

    thought: str
    content: str
    calls: list[tuple[ToolCallStart, str]]


def join_deltas(deltas: Iterable[OutputDelta]) -> JoinedOutput:
    """Join the deltas of one choice."""
    thought: list[str] = []
    content: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                thought.append(text)
            case ToolCallStart():
                calls.append((delta, []))
            case ArgumentsDelta(index, text):
                calls[index][1].append(text)
    written = [(start, "".join(arguments)) for start, arguments in calls]
    return JoinedOutput("".join(thought), "".join(content), written)


class OutputParser(Protocol):
    """Parses one choice."""

    def feed(self, text: str) -> list[OutputDelta]:
        """Return the deltas that `text` completes."""
        ...

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """Return the text held back as deltas, and why the choice ended. Raises `SchemaNotSatisfied`."""
        ...
