"""`Expressions`: regular expressions of a tenant, matched with modules' names as PEFT does, within bounds.

Invariant: it means what it means to Python's `re`, which PEFT uses, and all matching of one adapter ends in `BUDGET_S`.
"""

import re
import time
import warnings
from collections.abc import Callable
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


class Expressions:
    """The expressions of one adapter; `count`: so far."""

    def __init__(self) -> None:
        self.count = 0
        self._left_s = BUDGET_S

    def compile(self, field: str, source: str, frame: str = "{}") -> Callable[[str], bool]:
        """Return whether a name matches `source` within PEFT's `frame`; without a frame, the whole name.

        Raises `PeftConfigRejected`; so does what it returns, when the time is over.
        """
        self.count += 1
        if self.count > MAX_EXPRESSIONS:
            raise PeftConfigRejected(field, f"at most {MAX_EXPRESSIONS} regular expressions are allowed")
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
        search = compiled.fullmatch if frame == "{}" else compiled.match

        def matches(name: str) -> bool:
            started = time.monotonic()
            try:
                found = search(name, timeout=max(self._left_s, 1e-6))
            except TimeoutError as error:
                raise PeftConfigRejected(
                    field, f"the regular expression {shown(source)} takes more than {BUDGET_S:g} s to match"
                ) from error
            self._left_s -= time.monotonic() - started
            return found is not None

        return matches


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
