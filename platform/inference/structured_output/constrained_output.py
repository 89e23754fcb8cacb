"""`ConstrainedOutput`: how the text of an answer that was asked for in a form becomes content and calls.

Invariant: a reader only notes what is to be judged; it is judged in another process before anybody hears how the answer ended.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from loraplex.grammar.builder.output_plan import OutputPlan
from loraplex.grammar.parsing.deltas import AnswerReason, EngineReason, OutputDelta, OutputParser

ValidateValue: TypeAlias = Callable[[str, str], Awaitable[None]]
"""(schema, value), both JSON texts. Raises `SchemaNotSatisfied`."""


@dataclass(frozen=True, slots=True)
class ConstrainedOutput:
    """One request's composition and its way to a judge. `notes`: (schema, value), what its readers want judged.

    Readers run on the event loop, so notes are taken by whom they are of.
    """

    plan: OutputPlan
    validate: ValidateValue
    values: list[tuple[str, str]] = field(default_factory=list)

    def parser(self) -> OutputParser:
        """A reader for one choice."""
        return self.plan.reader(lambda schema, value: self.values.append((schema, value)))

    async def finish(
        self, parser: OutputParser, reason: EngineReason
    ) -> tuple[list[OutputDelta], AnswerReason]:
        """What the reader held back, and why its choice ended. Raises `SchemaNotSatisfied`."""
        try:
            ended = parser.finish(reason)
        finally:
            values = self.values.copy()
            self.values.clear()
        for schema, value in values:
            await self.validate(schema, value)
        return ended
