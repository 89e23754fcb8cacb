"""Splits an output into thought and answer, and leaves the answer to its own parser.

Invariant: blanks around the markers belong to neither side: templates write their own there.
"""

from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    EngineReason,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
)
from loraplex.grammar.parsing.json_scanner import BLANKS
from loraplex.grammar.parsing.literal_matcher import LiteralMatcher, MarkerFinder
from loraplex.grammar.thought import ThoughtMarkers


class ThoughtParser:
    """Parses one choice. `begun`: the prompt ends inside the thought; else the output may begin with the start marker."""

    def __init__(self, markers: ThoughtMarkers, answer: OutputParser, *, begun: bool) -> None:
        self._answer = answer
        self._start = LiteralMatcher("" if begun else markers.start)
        self._end = MarkerFinder(markers.end)
        self._has_thought = False
        self._has_answer = False
        self._is_plain = False

    def feed(self, text: str) -> list[OutputDelta]:
        """Return the deltas that `text` completes."""
        position = 0
        if not self._start.complete and not self._is_plain:
            position = self._start.match(text, 0)
            if not self._start.complete and position < len(text):
                # It does not begin with thought.
                self._is_plain = True
                text, position = self._start.matched_text + text[position:], 0
            elif not self._start.complete:
                return []
        if self._is_plain:
            return self._answer.feed(text)
        deltas: list[OutputDelta] = []
        if not self._end.found:
            thought, position = self._end.find(text, position)
            deltas += self._thought(thought)
        return [*deltas, *self._rest(text[position:])]

    def finish(self, reason: EngineReason) -> tuple[list[OutputDelta], AnswerReason]:
        """Return the text held back as deltas, and why the choice ended. Raises `SchemaNotSatisfied`."""
        held: list[OutputDelta] = []
        if not self._start.complete and not self._is_plain:
            held = self._answer.feed(self._start.matched_text)
        elif not self._is_plain and not self._end.found:
            held = self._thought(self._end.flush().rstrip(BLANKS))
        last, ended = self._answer.finish(reason)
        return [*held, *last], ended

    def _thought(self, text: str) -> list[OutputDelta]:
        text = text if self._has_thought else text.lstrip(BLANKS)
        self._has_thought |= bool(text)
        return [ReasoningDelta(text)] if text else []

    def _rest(self, text: str) -> list[OutputDelta]:
        text = text if self._has_answer else text.lstrip("\n")
        self._has_answer |= bool(text)
        return self._answer.feed(text) if text else []
