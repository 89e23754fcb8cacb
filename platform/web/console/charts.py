"""What a chart and its table show: the same numbers, in one order of series. Invariant: at most five series."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from loraplex.platform.web.console.formatting import SYMBOLS

MAX_SERIES: Final = 5


@dataclass(frozen=True, slots=True)
class Series:
    """A line or a part of bars. `number`, from 1, selects its colour, which is that of its place."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ChartRow:
    """One period. `values`: a number for each series, None where it is missing. `goes_on`: the period is the current one."""

    start: datetime
    values: tuple[int | None, ...]
    goes_on: bool


def symbol(currency: str) -> str:
    """Return what stands before an amount in a chart."""
    return SYMBOLS.get(currency, f"{currency}\u00a0")


def named(names: Sequence[str]) -> tuple[Series, ...]:
    """Number the series of a chart in their order."""
    return tuple(Series(name, number) for number, name in enumerate(names, start=1))
