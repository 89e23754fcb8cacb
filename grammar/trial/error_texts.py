"""Cleans error texts of grammar libraries for tenants: one bounded line, no control character, no place in library
source.
"""

import re
from typing import Final

MAX_TEXT: Final = 400

_SOURCE_PLACE: Final = re.compile(
    r"^\s*(?:\[[^\]\n]{0,40}\]\s*)?\S+\.(?:cc|cpp|cxx|h|hpp|rs|py):\d+(?::\d+)?:?\s*", re.MULTILINE
)
_FAILED_CHECK: Final = re.compile(r"Check failed: \(.*?\) is false:\s*")
_LISTING: Final = re.compile(r"^\s*(?:\d+ \|.*|\^+)$", re.MULTILINE)
_LARK_PLACE: Final = re.compile(r"^at (\d+)\((\d+)\): ")
_MARKS_OF_EXHAUSTION: Final = ("bad_alloc", "memory allocation", "cannot allocate memory")


def clean(text: str) -> str:
    """Return `text` on one line of at most 400 characters."""
    text_left = _LISTING.sub("", _FAILED_CHECK.sub("", _SOURCE_PLACE.sub("", text)))
    text_left = _LARK_PLACE.sub(r"line \1, column \2: ", text_left)
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text_left).split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether a library's error reports a failed allocation."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(mark in text for mark in _MARKS_OF_EXHAUSTION)
