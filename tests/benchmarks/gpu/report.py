"""The report: the target table row by row, then times, then what failed and what was not run.

Invariant: each section has room of its own, so that failures never push figures out, nor figures the table.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.benchmarks.gpu.targets import by_device, rows

MAX_TIMES = 70
MAX_FAILURES = 20
MAX_NOT_RUN = 20
MAX_WIDTH = 170
Line = Mapping[str, Any]


def report(lines: Sequence[Line]) -> list[str]:
    """Its lines of text; a table for each GPU, which come last: ends of outputs are what is kept."""
    real = [line for line in lines if line["stage"] != "build" or line["ok"] is False]
    times = [line for line in real if line["us_p50"] is not None or line["value"] is not None]
    failed = [line for line in real if line["ok"] is False]
    left = [line for line in real if line["ok"] is None]
    return [
        *_section("times", map(_timed, times), MAX_TIMES),
        *_section("failed", map(_reason, failed), MAX_FAILURES),
        *_section("not run", map(_reason, left), MAX_NOT_RUN),
        *(text for name, its in by_device(lines).items() for text in _table(name, its)),
    ]


def _table(device: str, lines: Sequence[Line]) -> list[str]:
    title = f"targets on {device}" if device else "targets"
    return _section(title, (row.text() for row in rows(lines)))


def _section(title: str, texts: Iterable[str], most: int | None = None) -> list[str]:
    known = list(texts)
    shown = [text.replace("\n", " ")[:MAX_WIDTH] for text in known[:most]]
    rest = [f"... {len(known) - len(shown)} more in the file"] if len(known) > len(shown) else []
    return [f"{title}: {len(known)}", *shown, *rest, ""]


def _named(line: Line) -> str:
    return f"{'dry ' if line['dry'] else ''}{line['stage']} {line['case']}"


def _reason(line: Line) -> str:
    errors = ", ".join(f"{name} {line[name]}" for name in ("rel_err", "worst", "nan", "unwritten"))
    return f"{_named(line)}: {line['error'] or errors}"


def _timed(line: Line) -> str:
    if line["us_p50"] is None:
        return f"{_named(line):<84} {line['value']:>12.3f} {line['unit']}"
    share = "" if line["pct_copy"] is None else f"{line['pct_copy']:>6.1f} % of copy"
    return f"{_named(line):<84} {line['us_p50']:>12.2f} us {share}"
