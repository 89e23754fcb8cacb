"""Fixed text in text that comes in deltas: one literal that must follow, and a marker anywhere. Invariant: what is matched_text back
may still become the literal or the marker, or is the blanks before one.
"""

from loraplex.grammar.parsing.json_scanner import BLANKS


class LiteralMatcher:
    """Matches one literal, `matched` characters of it so far."""

    __slots__ = ("literal", "matched")

    def __init__(self, literal: str) -> None:
        self.literal = literal
        self.matched = 0

    @property
    def complete(self) -> bool:
        return self.matched == len(self.literal)

    @property
    def matched_text(self) -> str:
        return self.literal[: self.matched]

    def match(self, text: str, start: int) -> int:
        """The position up to which `text` follows. Before its end, with `complete` false: it does not follow."""
        position = start
        while position < len(text) and not self.complete and text[position] == self.literal[self.matched]:
            position += 1
            self.matched += 1
        return position


class MarkerFinder:
    """Parts text from the first `marker` in it, whose first character occurs in it only once and is no blank.

    The blanks before the marker belong to neither: templates write their own there.
    """

    __slots__ = ("_blanks", "_marker")

    def __init__(self, marker: str) -> None:
        self._marker = LiteralMatcher(marker)
        self._blanks: list[str] = []

    @property
    def found(self) -> bool:
        return self._marker.complete

    def find(self, text: str, start: int) -> tuple[str, int]:
        """Text that is certainly before any marker, and the position after what was read: the end, or the marker's."""
        passed: list[str] = []
        position = start
        while position < len(text) and not self.found:
            if self._marker.matched:
                position = self._extend(text, position, passed)
            else:
                position = self._pass(text, position, passed)
        return "".join(passed), position

    def flush(self) -> str:
        """What is matched_text back, when no more text comes."""
        return "".join(self._blanks) + self._marker.matched_text

    def _extend(self, text: str, start: int, passed: list[str]) -> int:
        position = self._marker.match(text, start)
        if position < len(text) and not self.found:
            passed += [*self._blanks, self._marker.matched_text]
            self._blanks.clear()
            self._marker.matched = 0
        return position

    def _pass(self, text: str, start: int, passed: list[str]) -> int:
        hit = text.find(self._marker.literal[0], start)
        end = len(text) if hit < 0 else hit
        between = text[start:end]
        solid = between.rstrip(BLANKS)
        if solid:
            passed += [*self._blanks, solid]
            self._blanks.clear()
        self._blanks.append(between[len(solid) :])
        self._marker.matched = int(hit >= 0)
        return end + self._marker.matched
