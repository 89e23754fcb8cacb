"""Finds the end of one JSON value in streamed text (RFC 8259).

Invariant: each character is read once, and the state is three fields whatever the length.
"""

BLANKS = " \t\r\n"


class ValueScanner:
    """Tracks depth, strings and escapes only; the grammar guarantees that the value is well formed."""

    __slots__ = ("_depth", "_escaped", "_in_string", "closed")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.closed = False

    def scan(self, text: str, start: int = 0) -> int:
        """Return the position after the last character of `text` that belongs to the value; `closed` is true once it
        ended.

        A number or a word at the top level has no end of its own: it stays open.
        """
        for position in range(start, len(text)):
            self._take(text[position])
            if self.closed:
                return position + 1
        return len(text)

    def _take(self, character: str) -> None:
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.closed = self._depth <= 0

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.closed = self._depth == 0


def whole_value(text: str) -> str | None:
    """Return the JSON value at the start of `text`. None: an object, array or string without an end."""
    scanner = ValueScanner()
    end = scanner.scan(text)
    unbounded = text.lstrip(BLANKS)[:1] not in ("", "{", "[", '"')
    return text[:end] if scanner.closed or unbounded else None
