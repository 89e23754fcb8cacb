"""What a generation writes, as deltas that no dialect has: thought, text and calls of each choice, and how it ended.

Invariant: the deltas of a choice, joined, are the same whether its response streams or not.
"""

from loraplex.engine.messages import Delta, Finished
from loraplex.grammar.parsing.deltas import AnswerReason, ContentDelta, EngineReason, OutputDelta
from loraplex.platform.inference.generation import Generation


class AnswerParser:
    """Parses the events of one generation. `feed` and `finish` take those of a choice in their order."""

    def __init__(self, generation: Generation) -> None:
        self._output = generation.output
        # One for each choice; none for plain text.
        self._parsers = [each.parser() for each in [generation.output] * generation.choices if each]

    def feed(self, choice: int, event: Delta) -> list[OutputDelta]:
        """Return the deltas that an event completes."""
        if not self._parsers:
            return [ContentDelta(event.text)] if event.text else []
        return self._parsers[choice].feed(event.text)

    async def finish(self, choice: int, event: Finished) -> tuple[list[OutputDelta], AnswerReason]:
        """Return the remaining deltas of a choice, and why it ended. Raises `SchemaNotSatisfied`."""
        reason = ended_by(event)
        if self._output is None:
            return [], reason
        return await self._output.finish(self._parsers[choice], reason)


def ended_by(finished: Finished) -> EngineReason:
    """Return why the engine ended a choice."""
    return "stop" if finished.reason == "stop" else "length"
