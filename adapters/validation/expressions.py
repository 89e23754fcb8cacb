"""`Expression`: a regular expression of a tenant, matched with a module's name as PEFT does, within bounds.

Invariant: it means what it means to Python's `re`, which PEFT uses, and all matching of one adapter ends in `BUDGET_S`.
"""

import re
import time
import warnings
from typing import Final

import regex

from loraplex.adapters.errors import PeftConfigRejected
from loraplex.adapters.validation.shown import shown

BUDGET_S: Final = 5.0
"""Of the clock: an upload is read at the lowest priority."""
MAX_EXPRESSIONS: Final = 256
"""In one configuration."""
_ESCAPES: Final = re.compile(r"\\.", re.DOTALL)
_BRACE_OR_CODE_POINT: Final = re.compile(r"\{(?!\d*,?\d*\})")
_CODE_POINTS: Final = frozenset({r"\u", r"\U", r"\N"})


class MatchBudget:
    """The expressions of one adapter so far, and the seconds that are left for them."""

    def __init__(self) -> None:
        self.left_s = BUDGET_S
        self.expressions = 0

    def compile(self, field: str, source: str, frame: str = "{}") -> "Expression":
        """Compile `source` within PEFT's `frame`. Raises `PeftConfigRejected`."""
        self.expressions += 1
        if self.expressions > MAX_EXPRESSIONS:
            raise PeftConfigRejected(field, f"at most {MAX_EXPRESSIONS} regular expressions are allowed")
        return Expression(self, field, source, frame)


class Expression:
    """One expression. Without a frame it must match the whole name; PEFT's frame anchors what it needs itself."""

    def __init__(self, budget: MatchBudget, field: str, source: str, frame: str) -> None:
        self._budget, self._field, self._source = budget, field, source
        _require_common_syntax(field, source)
        text = frame.format(source)
        try:
            with warnings.catch_warnings():
                # A set whose meaning will change, which `regex` reads in its own way.
                warnings.simplefilter("error", FutureWarning)
                re.compile(text)
            compiled = regex.compile(text, regex.V0)
        except (re.error, regex.error, FutureWarning, RecursionError, OverflowError) as error:
            raise PeftConfigRejected(
                field, f"{shown(source)} is not a regular expression: {str(error)[:80]}"
            ) from error
        self._search = compiled.fullmatch if frame == "{}" else compiled.match

    def matches(self, name: str) -> bool:
        """Raises `PeftConfigRejected` when the budget ends."""
        started = time.monotonic()
        try:
            found = self._search(name, timeout=max(self._budget.left_s, 1e-6))
        except TimeoutError as error:
            raise PeftConfigRejected(
                self._field,
                f"the regular expression {shown(self._source)} takes more than {BUDGET_S:g} s to match",
            ) from error
        self._budget.left_s -= time.monotonic() - started
        return found is not None


def _require_common_syntax(field: str, source: str) -> None:
    """Refuse what `re` and `regex` read differently, and classes whose compilation takes long. Names of modules are ASCII."""
    if not source.isascii():
        raise PeftConfigRejected(field, f"{shown(source)}: a regular expression has ASCII characters only")
    if not _CODE_POINTS.isdisjoint(_ESCAPES.findall(source)) or _BRACE_OR_CODE_POINT.search(
        _ESCAPES.sub("", source)
    ):
        raise PeftConfigRejected(
            field, f"{shown(source)}: braces count repetitions only, and \\u, \\U and \\N are not allowed"
        )
