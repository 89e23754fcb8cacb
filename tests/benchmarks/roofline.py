"""A roofline (Williams et al. 2009): speed of kernels under the ceilings of memcpy bandwidth and matrix products.

Both axes are logarithmic: operations per byte that must be moved, and operations per second.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 760, 380, 64, 40, 16
CEILINGS = "ceilings of this run"
PROBED_COPY, PROBED_PRODUCT = "probe: probe/copy, read and written", "probe: probe/product of 8192"


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel: its position on the page, its label and its group."""

    x: float
    y: float
    name: str
    group: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid at `place`, and its label."""

    place: float
    label: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """Everything the template draws. `roof` is the points of a polyline."""

    points: tuple[Point, ...]
    groups: tuple[str, ...]
    roof: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = HEIGHT - BOTTOM
    right: int = WIDTH - MARGIN
    top: int = MARGIN


@dataclass(frozen=True, slots=True)
class _Axis:
    """Powers of ten from `low` to `high` over the pixels from `begin` to `end`."""

    low: int
    high: int
    begin: float
    end: float

    def place(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def ticks(self) -> tuple[Tick, ...]:
        return tuple(Tick(self.place(10.0**power), _power(power)) for power in range(self.low, self.high + 1))


def roofline_of(figures: Mapping[str, Mapping[str, Any]]) -> Roofline | None:
    """The roofline of those figures that have `bytes`, `flops` and `us_p50`; None without any, or without ceilings."""
    ceilings = _ceilings(figures)
    timed = {
        case: figure
        for case, figure in figures.items()
        if figure.get("us_p50") and figure.get("flops") and figure.get("bytes")
    }
    if ceilings is None or not timed:
        return None
    copy, products = ceilings
    intensity = {case: figure["flops"] / figure["bytes"] for case, figure in timed.items()}
    speed = {case: figure["flops"] / figure["us_p50"] * 1e6 for case, figure in timed.items()}
    ridge = products / copy
    x = _axis([*intensity.values(), ridge], LEFT, WIDTH - MARGIN)
    y = _axis([*speed.values(), products, copy * 10.0**x.low], HEIGHT - BOTTOM, MARGIN)
    groups = tuple(dict.fromkeys(_group(case) for case in timed))
    points = tuple(
        Point(
            x.place(intensity[case]),
            y.place(speed[case]),
            _point_label(case, figure),
            groups.index(_group(case)),
        )
        for case, figure in timed.items()
    )
    corners = [(10.0**x.low, copy * 10.0**x.low), (ridge, products), (10.0**x.high, products)]
    roof = " ".join(f"{x.place(a)},{y.place(b)}" for a, b in corners)
    return Roofline(points, groups, roof, x.ticks(), y.ticks())


def _ceilings(figures: Mapping[str, Mapping[str, Any]]) -> tuple[float, float] | None:
    """Memcpy bandwidth (bytes read and written per second) and operations per second, of the same run."""
    if CEILINGS in figures:
        found = figures[CEILINGS]
        return found["gbs"] * 1e9, found["gflops"] * 1e9
    if PROBED_COPY in figures and PROBED_PRODUCT in figures:
        return figures[PROBED_COPY]["value"] * 1e9, figures[PROBED_PRODUCT]["value"] * 1e12
    return None


def _axis(values: list[float], begin: float, end: float) -> _Axis:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return _Axis(low, max(high, low + 1), begin, end)


def _group(case: str) -> str:
    return case.removeprefix("time: ").partition("/")[0]


def _point_label(case: str, figure: Mapping[str, Any]) -> str:
    share = figure.get("pct_copy")
    of_copy = "" if share is None else f", {share:.0f} % of memcpy bandwidth"
    return f"{case}: {figure['us_p50']:.4g} us{of_copy}"


def _power(power: int) -> str:
    names = {0: "1", 3: "1k", 6: "1M", 9: "1G", 12: "1T", 15: "1P"}
    base = power // 3 * 3
    return f"{10 ** (power - base)}{names[base][1:]}" if base in names else f"1e{power}"
