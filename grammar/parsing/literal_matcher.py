"""Matches fixed text in streamed text: a literal that must follow, and a marker anywhere.

Invariant: text is held back only while it may become the literal or the marker, or is the blanks before a marker.
"""

from loraplex.grammar.parsing.json_scanner import BLANKS


class LiteralMatcher:
    """Matches one literal; `matched` counts the characters matched so far."""

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
        """Return the position up to which `text` matches; a mismatch leaves `complete` false before the end."""
        position = start
        while position < len(text) and not self.complete and text[position] == self.literal[self.matched]:
            position += 1
            self.matched += 1
        return position


class MarkerFinder:
    """Splits text at the first `marker`, whose first character occurs in it only once and is no blank.

    The blanks before the marker belong to neither side: templates write their own there.
    """

    __slots__ = ("_blanks", "_marker")

    def __init__(self, marker: str) -> None:
        self._marker = LiteralMatcher(marker)
        self._blanks: list[str] = []

    @property
    def found(self) -> bool:
        return self._marker.complete

    def find(self, text: str, start: int) -> tuple[str, int]:
        """Return the text certainly before any marker, and the position after what was read: the end, or the
        marker's.
        """
        passed: list[str] = []
        position = start
        while position < len(text) and not self.found:
            if self._marker.matched:
                position = self._extend(text, position, passed)
            else:
                position = self._pass(text, position, passed)
        return "".join(passed), position

    def flush(self) -> str:
        """Return the text that is held back when the input has ended."""
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
