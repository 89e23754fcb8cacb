"""Parses constrained output into content and tool calls, and validates finished values.

Invariant: a parser only collects the values to validate. A worker process validates them before the `finish_reason` is sent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from loraplex.grammar.builder.output_plan import OutputPlan
from loraplex.grammar.parsing.deltas import AnswerReason, EngineReason, OutputDelta, OutputParser
from loraplex.grammar.parsing.thought_parser import ThoughtParser
from loraplex.grammar.spec import ANY_TEXT, GrammarSpec, Thought
from loraplex.grammar.thought import ThoughtMarkers

ValidateValue: TypeAlias = Callable[[str, str], Awaitable[None]]
"""(schema, value), both JSON texts. Raises `SchemaNotSatisfied`."""


@dataclass(frozen=True, slots=True)
class ConstrainedOutput:
    """The output plan of one request and its validator. `values`: (schema, value) that its parsers have collected.

    `param` is the field of the request that its grammar is attributed to. `thought`: what may come before the output.

    `finish` runs on the event loop and takes the values at once, so that they belong to its own choice.
    """

    plan: OutputPlan
    validate: ValidateValue
    param: str
    thought: Thought | None = None
    values: list[tuple[str, str]] = field(default_factory=list)

    def parser(self) -> OutputParser:
        """Create the parser of one choice."""
        answer = self.plan.parser(lambda schema, value: self.values.append((schema, value)))
        if self.thought is None:
            return answer
        markers = ThoughtMarkers(self.thought.start, self.thought.end)
        return ThoughtParser(markers, answer, begun=self.thought.begun)

    @property
    def spec(self) -> GrammarSpec | None:
        """The grammar of the thought and the output; None where any text may be written, as long as the request allows."""
        spec, thought = self.plan.spec, self.thought
        if thought is None or (spec is None and thought.most is None):
            return spec
        return msgspec.structs.replace(spec or ANY_TEXT, thought=thought)

    async def finish(
        self, parser: OutputParser, reason: EngineReason
    ) -> tuple[list[OutputDelta], AnswerReason]:
        """Return the remaining deltas of the parser and why its choice ended. Raises `SchemaNotSatisfied`."""
        try:
            ended = parser.finish(reason)
        finally:
            values = self.values.copy()
            self.values.clear()
        for schema, value in values:
            await self.validate(schema, value)
        return ended
