"""Thought: the text between two markers that a model writes before its answer, and how many tokens of an output it takes.

Invariant: thought ends with the first end marker behind its beginning, however its bytes are divided into tokens.
"""

from dataclasses import dataclass
from typing import Final

from loraplex.grammar.errors import GrammarInvalid

MIN_MARKER_BYTES: Final = 3
MAX_MARKER_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """The texts that begin and end thought. Raises `GrammarInvalid` for markers that no text can be split by in one way only."""

    start: str
    end: str

    def __post_init__(self) -> None:
        for marker in (self.start, self.end):
            size = len(marker.encode(errors="replace"))
            if not MIN_MARKER_BYTES <= size <= MAX_MARKER_BYTES or not (
                marker.isascii() and marker.isprintable()
            ):
                raise GrammarInvalid(
                    f"a marker has {MIN_MARKER_BYTES} to {MAX_MARKER_BYTES} printable ASCII characters, not {marker[:80]!r}"
                )
            if marker[0].isspace() or marker[0] in marker[1:]:
                raise GrammarInvalid(f"a marker's first character occurs in it once, unlike in {marker!r}")
        if self.start in self.end or self.end in self.start:
            raise GrammarInvalid("one marker contains the other")


THINK: Final = ThoughtMarkers("<think>", "</think>")
KNOWN: Final = (
    THINK,
    ThoughtMarkers("[THINK]", "[/THINK]"),
    ThoughtMarkers("<thinking>", "</thinking>"),
    ThoughtMarkers("<seed:think>", "</seed:think>"),
    ThoughtMarkers("<reasoning>", "</reasoning>"),
    ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""The markers of models that are widely used, by which a template is searched."""


def markers_of_template(template: str | None) -> ThoughtMarkers | None:
    """Find the markers that a chat template spells by text search. A template is read, never run."""
    text = template or ""
    return next((markers for markers in KNOWN if markers.end in text), None)


def follow(marker: bytes, matched: int, data: bytes) -> tuple[int, int | None]:
    """Search on for a marker of which `matched` bytes are known: (matched bytes at the end of `data`, end of the marker in it)."""
    for position, byte in enumerate(data):
        if byte == marker[matched]:
            matched += 1
            if matched == len(marker):
                return 0, position + 1
        else:
            # No other prefix can match: its first byte occurs in a marker once.
            matched = int(byte == marker[0])
    return matched, None


class ThoughtCounter:
    """Counts the tokens of one choice that are thought: those between its markers. `begun`: the prompt ends inside the thought.

    A token that has text of both sides of the end marker is none of them.
    """

    __slots__ = ("_end", "_head", "_is_open", "_marker_tokens", "_matched", "_start")

    def __init__(self, markers: ThoughtMarkers, *, begun: bool) -> None:
        self._start, self._end = markers.start.encode(), markers.end.encode()
        self._head = b""
        self._is_open: bool | None = True if begun else None
        self._matched = 0
        self._marker_tokens = 0

    def count(self, token: bytes) -> int:
        """Take the next token; return how many are known to be thought by it. Tokens that may be the end marker wait for the next."""
        if self._is_open is None:
            token = self._open(token)
        if not self._is_open or not token:
            return 0
        before, waiting = self._matched, self._marker_tokens
        self._matched, end = follow(self._end, before, token)
        if end is not None:
            self._is_open = False
            # Where in this token the marker begins; below 0 in an earlier one.
            begins = end - len(self._end)
            return 0 if begins < 0 else waiting + bool(begins)
        if self._matched == before + len(token):
            self._marker_tokens += 1
            return 0
        is_beginning = self._matched == len(token)
        self._marker_tokens = int(is_beginning)
        return waiting + (not is_beginning)

    def rest(self, missing: int) -> int:
        """End the output, of which `missing` tokens are not known; return how many more are thought."""
        waiting, self._marker_tokens = self._marker_tokens, 0
        return waiting + missing if self._is_open else 0

    def _open(self, token: bytes) -> bytes:
        """Read the start marker; return what is thought behind it."""
        self._head += token
        if self._head.startswith(self._start):
            self._is_open = True
            return self._head[len(self._start) :]
        if not self._start.startswith(self._head):
            self._is_open = False
        return b""
