"""Texts that could become a control token together with what a template writes beside them: `|im_end|` between `<` and `>`.

Invariant: no control token of which an edged text is a part is spelled any more, wherever a template puts the text.
"""

from collections.abc import Collection
from typing import Final

# Names that templates look up or compare, which nothing may change. They are no part of a control token of their own.
LOOKED_UP: Final = frozenset(
    ("function", "name", "description", "parameters", "arguments", "content", "role", "id", "tool_calls")
    + ("tool_call_id", "type", "object", "array", "string", "number", "integer", "boolean", "null")
    + (
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "default",
        "title",
        "format",
        "pattern",
        "nullable",
    )
    + ("additionalProperties", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "definitions", "return")
)


class TokenFragments:
    """Knows the beginnings, ends and insides of `tokens`."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._longest = max(map(len, tokens), default=1) - 1
        self._first = frozenset(token[0] for token in tokens)
        self._last = frozenset(token[-1] for token in tokens)
        cuts = [(token, cut) for token in tokens for cut in range(1, len(token))]
        self._beginnings = frozenset(token[:cut] for token, cut in cuts)
        self._ends = frozenset(token[cut:] for token, cut in cuts)
        self._insides = frozenset(token[cut:end] for token, cut in cuts for end in range(cut + 1, len(token)))

    def edged(self, text: str, edge: str) -> str:
        """`text` with `edge` where a control token could begin before it, end behind it, or both."""
        if text in LOOKED_UP or not self._longest:
            return text
        inside = text in self._insides
        before = edge if inside or self._ends_at_start(text) else ""
        behind = edge if inside or self._begins_at_end(text) else ""
        return f"{before}{text}{behind}"

    def _ends_at_start(self, text: str) -> bool:
        start = text[: self._longest]
        if self._last.isdisjoint(start):
            return False
        return any(start[:cut] in self._ends for cut in range(1, len(start) + 1))

    def _begins_at_end(self, text: str) -> bool:
        end = text[-self._longest :]
        if self._first.isdisjoint(end):
            return False
        return any(end[cut:] in self._beginnings for cut in range(len(end)))
