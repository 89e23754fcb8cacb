"""The deltas that a parser makes of output text: thought, content and tool calls.

Invariant: joined, the deltas of one text are the same however the text was split.
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


class OutputParser(Protocol):
    """Parses one choice."""

    def feed(self, text: str) -> list[OutputDelta]:
        """Return the deltas that `text` completes."""
        ...

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """Return the text held back as deltas, and why the choice ended. Raises `SchemaNotSatisfied`."""
        ...
