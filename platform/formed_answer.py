"""`FormedAnswer`: how the text of an answer that was asked for in a form becomes content and calls.

Invariant: a reader only notes what is to be judged; it is judged in another process before anybody hears how the answer ended.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from loraplex.grammar.answer.composition import Composition
from loraplex.grammar.answer.content_reader import Judge
from loraplex.grammar.answer.pieces import AnswerReader, AnswerReason, EngineReason, Piece
from loraplex.grammar.answer_form import JsonSchemaValue

JudgeValue: TypeAlias = Callable[[str, str], Awaitable[None]]
"""(schema, value), both JSON texts. Raises `AnswerNotSatisfied`."""


@dataclass(frozen=True, slots=True)
class NotingJudge:
    """A judge that notes (schema, value) and says nothing. `schema` is a JSON text."""

    schema: str
    notes: list[tuple[str, str]]

    def __call__(self, value: str) -> None:
        self.notes.append((self.schema, value))


@dataclass(frozen=True, slots=True)
class NotedJudgements:
    """What the readers of one composition want judged. Readers run on the event loop, so notes are taken by whom they are of."""

    notes: list[tuple[str, str]] = field(default_factory=list)

    def judge_of(self, schema: JsonSchemaValue) -> Judge:
        return NotingJudge(json.dumps(schema), self.notes)

    def take(self) -> list[tuple[str, str]]:
        """The notes since the last call."""
        taken = self.notes.copy()
        self.notes.clear()
        return taken


@dataclass(frozen=True, slots=True)
class FormedAnswer:
    """One request's composition and its way to a judge."""

    composition: Composition
    judgements: NotedJudgements
    judge: JudgeValue

    def reader(self) -> AnswerReader:
        """A reader for one choice."""
        return self.composition.reader()

    async def finish(self, reader: AnswerReader, reason: EngineReason) -> tuple[list[Piece], AnswerReason]:
        """What the reader held back, and why its choice ended. Raises `AnswerNotSatisfied`."""
        try:
            ended = reader.finish(reason)
        finally:
            notes = self.judgements.take()
        for schema, value in notes:
            await self.judge(schema, value)
        return ended
