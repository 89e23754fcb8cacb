"""Result lines: one JSON document each, whole in itself, flushed at once; and the table at the end."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loraplex.platform.bench.report import commit, hardware, versions

FILE = "gpu.jsonl"
MAX_TABLE_LINES = 60
FIELDS = (
    *("stage", "op", "variant", "shape", "dtype", "case", "ok", "rel_err", "worst", "nan", "unwritten"),
    *("us_p10", "us_p50", "us_p90", "bytes", "flops", "gbs", "pct_copy", "value", "unit"),
    *("regs", "stack", "shared", "compile_s", "dry", "error"),
)
"""Of every line, None where it does not apply; beside them hardware, versions, driver, commit and time."""


class Recorder:
    """Appends to `folder / FILE` and keeps the lines for the table."""

    def __init__(self, folder: Path, *, is_dry: bool, driver: str | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.lines: list[dict[str, Any]] = []
        self._head = {
            "benchmark": "gpu",
            "commit": commit(),
            "hardware": hardware(),
            "versions": versions(),
            "driver": driver,
        }
        self._is_dry = is_dry

    def add(self, line: Mapping[str, Any]) -> None:
        """Write one line. Raises `KeyError` for a field that is none."""
        unknown = set(line) - set(FIELDS)
        if unknown:
            raise KeyError(f"not fields of a line: {', '.join(sorted(unknown))}")
        whole = dict.fromkeys(FIELDS) | {"dry": self._is_dry} | dict(line)
        self.lines.append(whole)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        with self.path.open("a") as file:
            file.write(json.dumps(self._head | {"at": at} | whole) + "\n")


def table(lines: list[dict[str, Any]], verdicts: list[str]) -> list[str]:
    """At most `MAX_TABLE_LINES` lines: the verdicts, then what failed, then times as far as there is room."""
    failed = [
        f"FAILED {_named(line)}: {line['error'] or _errors(line)}" for line in lines if line["ok"] is False
    ]
    room = MAX_TABLE_LINES - len(verdicts) - 2
    shown = failed[: max(room, 0)]
    timed = [_timed(line) for line in lines if line["us_p50"] is not None or line["value"] is not None]
    shown += timed[: max(room - len(shown), 0)]
    left = len(failed) + len(timed) - len(shown)
    rest = [f"... {left} more lines in the file"] if left else []
    return [*verdicts, *shown, *rest]


def _named(line: Mapping[str, Any]) -> str:
    dry = "dry " if line["dry"] else ""
    return f"{dry}{line['stage']} {line['case']}"[:96]


def _errors(line: Mapping[str, Any]) -> str:
    return (
        f"rel_err {line['rel_err']}, worst {line['worst']}, {line['nan']} nan, {line['unwritten']} unwritten"
    )


def _timed(line: Mapping[str, Any]) -> str:
    if line["us_p50"] is None:
        return f"{_named(line):<72} {line['value']:>12.3f} {line['unit']}"
    share = "" if line["pct_copy"] is None else f"{line['pct_copy']:>6.1f} % of copy"
    return f"{_named(line):<72} {line['us_p50']:>12.2f} us {share}"
