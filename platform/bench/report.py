"""The result of a benchmark: cases, ratios with their requirements, and the hardware and versions they were measured with.

Invariant: both sides of a ratio come from one run, each case and each ratio is one JSON line, and no line names a host or a user.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.platform.startup_errors import StartError

MAX_CASE_COLUMNS = 6
PACKAGES = ("loraplex", "torch", "transformers", "peft", "numba", "triton")
RESULTS = Path("tests", "benchmarks", "results")


class BenchFailed(StartError):
    """The run gives no figure; the command ends with exit code 1."""


@dataclass(frozen=True, slots=True)
class Case:
    """The figures of one measurement. Times are in the unit their name ends with."""

    name: str
    shape: Mapping[str, Any]
    figure: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and the bound it must meet; with `required` None it is printed without a verdict."""

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
        """One complete document per case and per ratio."""
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
        """Print the tables and notes."""
        console.print(self._case_table())
        if self.ratios:
            console.print(self._ratio_table())
        for note in self.notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)

    def _case_table(self) -> Table:
        """One column per case, or one row per case if there are more than `MAX_CASE_COLUMNS`."""
        title = f"bench {self.benchmark}"
        if len(self.cases) > MAX_CASE_COLUMNS:
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
    """Write a new file `<benchmark>-<time>.jsonl` to `folder`."""
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


def checkout_root() -> Path | None:
    """The root of the checkout this package runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / ".git").exists() and (root / RESULTS.parent).is_dir() else None


def hardware() -> dict[str, str | int | None]:
    """Memory in bytes; `cores` are those this process may use."""
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu_model(),
    }


def available_cores() -> int:
    """Cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python and of those `PACKAGES` that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the checkout, with `+changes` if tracked files differ from it; None without one."""
    root = checkout_root()
    if root is None or shutil.which("git") is None:
        return None
    head = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if head and changed else head


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _gpu_model() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or None


def _output(*command: str) -> str | None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
