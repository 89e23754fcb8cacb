"""Marks texts that could form a control token with adjacent text of a template: `|im_end|` between `<` and `>`.

Invariant: a marked text is part of no control token, wherever a template puts it.
"""

from collections.abc import Collection
from typing import Final

# Names that templates look up or compare. They must not change, and are by themselves no part of a control token.
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
    """The beginnings, ends and insides of `tokens`."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._longest = max(map(len, tokens), default=1) - 1
        self._first = frozenset(token[0] for token in tokens)
        self._last = frozenset(token[-1] for token in tokens)
        cuts = [(token, cut) for token in tokens for cut in range(1, len(token))]
        self._beginnings = frozenset(token[:cut] for token, cut in cuts)
        self._ends = frozenset(token[cut:] for token, cut in cuts)
        self._insides = frozenset(token[cut:end] for token, cut in cuts for end in range(cut + 1, len(token)))

    def edged(self, text: str, edge: str) -> str:
        """Add `edge` where a control token could begin before `text`, end after it, or both."""
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
