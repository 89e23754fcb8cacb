"""Result lines: one JSON document each, whole in itself, flushed at once.

Invariant: a line that was written stays, whatever happens to the process after it.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loraplex.platform.bench.report import commit, hardware, versions

FILE = "gpu.jsonl"
FIELDS = (
    *("stage", "op", "variant", "shape", "dtype", "case", "ok", "rel_err", "worst", "nan", "unwritten"),
    *("us_p10", "us_p50", "us_p90", "bytes", "flops", "gbs", "pct_copy", "value", "unit"),
    *("regs", "stack", "shared", "compile_s", "dry", "error"),
)
"""Of every line, None where it does not apply; beside them hardware, versions, driver, commit and time.

`ok` is True for what was measured or passed, False for what failed, None for what was not run; `error` says why.
"""


class Recorder:
    """Appends to `folder / FILE` and keeps the lines for the report."""

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


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of several runs, in the order of the files."""
    return [json.loads(text) for path in paths for text in path.read_text().splitlines()]
