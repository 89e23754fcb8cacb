"""What a benchmark found: cases with shape and figures, and ratios against what is required of them.

Invariant: every ratio's two sides were measured in the same run; one JSON line is written per case and per ratio.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.platform.bench.machine import commit, hardware, versions

MOST_BESIDE = 6


@dataclass(frozen=True, slots=True)
class Case:
    """One measured thing. Times are in the unit their name ends with."""

    name: str
    shape: Mapping[str, Any]
    figure: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure with a demand on it; `required` None is shown without a verdict."""

    name: str
    value: float
    required: float | None = None
    kind: Literal["at least", "at most"] = "at least"

    @property
    def holds(self) -> bool | None:
        if self.required is None:
            return None
        return self.value >= self.required if self.kind == "at least" else self.value <= self.required


@dataclass(slots=True)
class Report:
    """The outcome of one benchmark. `columns` are the figures shown in the table."""

    benchmark: str
    columns: tuple[str, ...]
    cases: list[Case] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        """One document per case and ratio, each whole in itself."""
        head = {
            "benchmark": self.benchmark,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "hardware": hardware(),
            "versions": versions(),
        }
        found = [
            head | {"case": case.name, "shape": dict(case.shape), "figure": dict(case.figure)}
            for case in self.cases
        ]
        return found + [
            head | {"case": ratio.name, "shape": {}, "figure": _verdict(ratio)} for ratio in self.ratios
        ]

    def print(self, console: Console) -> None:
        """Tables for people."""
        console.print(self._case_table())
        if self.ratios:
            console.print(self._ratio_table())
        for note in self.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _case_table(self) -> Table:
        """Cases side by side, or below each other where they are many."""
        title = f"bench {self.benchmark}"
        if len(self.cases) > MOST_BESIDE:
            table = Table("case", *self.columns, title=title)
            for case in self.cases:
                cells = (_cell(case.figure.get(column)) for column in self.columns)
                table.add_row(escape(case.name), *cells)
            return table
        table = Table("figure", *(escape(case.name) for case in self.cases), title=title)
        for column in self.columns:
            table.add_row(column, *(_cell(case.figure.get(column)) for case in self.cases))
        return table

    def _ratio_table(self) -> Table:
        table = Table("ratio", "measured", "required", "holds")
        for ratio in self.ratios:
            demand = "-" if ratio.required is None else f"{ratio.kind} {ratio.required:g}"
            verdict = {None: "-", True: "[green]yes[/green]", False: "[red]no[/red]"}[ratio.holds]
            table.add_row(escape(ratio.name), f"{ratio.value:.3f}", demand, verdict)
        return table


def write_lines(report: Report, folder: Path) -> Path:
    """A new file `<benchmark>-<time>.jsonl` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path = folder / f"{report.benchmark}-{stamp}.jsonl"
    with path.open("x") as file:
        file.writelines(json.dumps(line) + "\n" for line in report.lines())
    return path


def _verdict(ratio: Ratio) -> dict[str, Any]:
    return {
        "ratio": ratio.value,
        "kind": ratio.kind,
        "required": ratio.required,
        "holds": ratio.holds,
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else escape(str(value))
