"""What a reader makes of an answer's text: content and tool calls in deltas. Invariant: for one text the deltas joined are
the same however the text was cut.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

EngineReason: TypeAlias = Literal["stop", "length"]
AnswerReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the message, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call whose name is complete. `index` counts the calls of one choice from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More text of the arguments of call `index`, never empty; joined they are one JSON object as it was written."""

    index: int
    text: str


OutputDelta: TypeAlias = ContentDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Reads one choice."""

    def feed(self, text: str) -> list[OutputDelta]:
        """The deltas that `text` completes."""
        ...

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """What was matched_text back, and why the choice ended. Raises `SchemaNotSatisfied`."""
        ...
