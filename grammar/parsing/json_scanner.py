"""Where one JSON value ends in text that comes in deltas (RFC 8259). Invariant: each character is looked at once, and the
state is three fields, whatever the length.
"""

BLANKS = " \t\r\n"


class ValueScanner:
    """Follows depth, strings and escapes only: that the value is well formed is the grammar's work."""

    __slots__ = ("_depth", "_escaped", "_in_string", "closed")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.closed = False

    def scan(self, text: str, start: int = 0) -> int:
        """The position after the last character of `text` that belongs to the value; `closed` tells whether it ended.

        A number or a word at the top has no end of its own: it stays open.
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
    """The JSON value `text` begins with, without what follows it. None: an object, array or string that has no end."""
    scanner = ValueScanner()
    end = scanner.scan(text)
    unbounded = text.lstrip(BLANKS)[:1] not in ("", "{", "[", '"')
    return text[:end] if scanner.closed or unbounded else None
