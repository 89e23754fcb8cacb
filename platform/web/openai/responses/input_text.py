"""Reads the text of a custom tool's input out of the arguments of its call, `{"input": "…"}`, as they arrive (RFC 8259).

Invariant: joined, the texts are the same however the arguments were cut.
"""

import json
import re
from typing import Final

_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEX: Final = "[0-9a-fA-F]"
_PAIR: Final = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_LONE: Final = rf"\\u[dD][89abAB]{_HEX}{{2}}(?!(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}{{0,2}})?)?)?)?\Z)"
_WHOLE: Final = re.compile(rf'(?:[^"\\]+|\\["\\/bfnrt]|{_PAIR}|{_LONE}|\\u(?![dD][89abAB]){_HEX}{{4}})*')
"""Whole characters; the first half of a pair of surrogates waits for the other half."""


class InputText:
    """The input of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """Return the text that the next part of the arguments completes."""
        self._held += arguments
        if not self._begun:
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._begun, self._held = True, self._held[head.end() :]
        whole = _WHOLE.match(self._held)
        end = 0 if whole is None else whole.end()
        text: str = json.loads(f'"{self._held[:end]}"', strict=False)
        self._held = self._held[end:]
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
