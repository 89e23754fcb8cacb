"""The page of results: hardware, ratios and figures of each run, and a roofline of timed kernels.

Invariant: the page shows the newest run of a benchmark on a machine, loads nothing, and escapes every text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from tests.benchmarks.roofline import Roofline, roofline_of

from loraplex.platform.bench.report import BenchFailed

TEMPLATE = "page.html.jinja"
Line = Mapping[str, Any]
_KERNEL_FIGURES = ("us_p50", "us_p90", "gbs", "pct_copy", "value", "unit", "rel_err", "nan", "unwritten")
_MAX_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class Run:
    """The lines of one benchmark on one machine, of one commit. `rows` has one entry per case, `verdicts` one per ratio."""

    title: str
    at: str
    commit: str
    machine: str
    versions: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    verdicts: tuple[tuple[str, str, str, bool | None], ...]
    roofline: Roofline | None


def read_lines(folder: Path) -> list[Line]:
    """All lines of a folder's files without those of dry runs. Raises `BenchFailed` naming file and line."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                known = {"benchmark", "at", "hardware", "versions", "case"} <= set(line)
            except (ValueError, TypeError) as error:
                raise BenchFailed(f"{path.name}, line {number}: no JSON object: {error}") from error
            if not known:
                raise BenchFailed(f"{path.name}, line {number}: not a line of a benchmark")
            if not line.get("dry"):
                lines.append(line)
    return lines


def render(lines: Sequence[Line]) -> str:
    """Render the lines as one page."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(TEMPLATE).render(runs=[_run(group) for group in _newest(lines)])


def _newest(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of the last measured commit of each benchmark and machine, newest first."""
    groups: dict[tuple[str, str], dict[str | None, list[Line]]] = {}
    for line in lines:
        key = (line["benchmark"], _machine(line["hardware"]))
        groups.setdefault(key, {}).setdefault(line.get("commit"), []).append(line)
    newest = [max(commits.values(), key=_latest) for commits in groups.values()]
    return sorted(newest, key=_latest, reverse=True)


def _latest(lines: Sequence[Line]) -> str:
    return max(str(line["at"]) for line in lines)


def _run(lines: Sequence[Line]) -> Run:
    head = lines[-1]
    figures = {_case(line): _figure(line) for line in lines}
    plain = {case: figure for case, figure in figures.items() if "ratio" not in figure}
    columns = tuple(dict.fromkeys(name for figure in plain.values() for name in figure))[:_MAX_COLUMNS]
    return Run(
        title=str(head["benchmark"]),
        at=_latest(lines),
        commit=str(head.get("commit") or "unknown"),
        machine=_machine(head["hardware"]),
        versions=", ".join(f"{name} {version}" for name, version in head["versions"].items()),
        columns=columns,
        rows=tuple(
            (case, tuple(_text(figure.get(name)) for name in columns)) for case, figure in plain.items()
        ),
        verdicts=tuple(_verdict(case, figure) for case, figure in figures.items() if "ratio" in figure),
        roofline=roofline_of(plain),
    )


def _case(line: Line) -> str:
    stage = line.get("stage")
    return f"{stage}: {line['case']}" if stage else str(line["case"])


def _figure(line: Line) -> dict[str, Any]:
    """The figures of a line; those of the GPU runner are top-level fields."""
    if "figure" in line:
        return dict(line["figure"])
    figure = {name: line[name] for name in _KERNEL_FIGURES if line.get(name) is not None}
    if line.get("ok") is False:
        figure["error"] = line.get("error") or "wrong"
    return figure | {name: line[name] for name in ("bytes", "flops") if line.get("us_p50") is not None}


def _verdict(case: str, figure: Mapping[str, Any]) -> tuple[str, str, str, bool | None]:
    required = figure.get("required")
    demand = "" if required is None else f"{figure.get('kind', 'at least')} {required:g}"
    return case, _text(figure["ratio"]), demand, figure.get("holds")


def _machine(hardware: Mapping[str, Any]) -> str:
    gpu = hardware.get("gpu")
    cpu = f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
    return f"{gpu}, {cpu}" if gpu else cpu


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
