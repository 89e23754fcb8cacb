"""Result lines: one JSON document each, whole in itself, flushed at once and printed; what was known before them.

Invariant: a line that was written stays, whatever happens to the process after it.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.state import whole_lines

FILE = "gpu.jsonl"
FIELDS = (
    *("stage", "op", "variant", "shape", "dtype", "case", "ok", "rel_err", "worst", "nan", "unwritten"),
    *("us_p10", "us_p50", "us_p90", "bytes", "flops", "gbs", "pct_copy", "value", "unit"),
    *("regs", "stack", "shared", "compile_s", "dry", "error", "work", "final"),
)
"""Of every line, None where it does not apply; beside them `run`, hardware, versions, driver, cache, commit and time.

`ok` is True for what was measured or passed, False for what failed, None for what was not run; `error` says why. `work` is the
piece of work that the line belongs to, `final` whether it is its last one: see `state.py`.
"""
Line = dict[str, Any]


class Recorder:
    """Appends to `folder / FILE` with `head` in each line. `lines` are those and the `known` ones, for the report."""

    def __init__(
        self, folder: Path, head: Mapping[str, Any], *, is_dry: bool, known: Sequence[Line] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.lines: list[Line] = list(known)
        self._head = {"benchmark": "gpu", **head}
        self._is_dry = is_dry
        self._began = time.monotonic()
        if self.path.exists():
            _end_last_line(self.path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write and print one line. Raises `KeyError` for a field that is none."""
        unknown = set(line) - set(FIELDS)
        if unknown:
            raise KeyError(f"not fields of a line: {', '.join(sorted(unknown))}")
        at = datetime.now(UTC).isoformat(timespec="seconds")
        whole = self._head | {"at": at} | dict.fromkeys(FIELDS) | {"dry": self._is_dry} | dict(line)
        self.lines.append(whole)
        with self.path.open("a") as file:
            file.write(json.dumps(whole) + "\n")
        if whole["stage"] != "end":
            print(f"{time.monotonic() - self._began:6.1f} {_text(whole)}", flush=True)


def _end_last_line(path: Path) -> None:
    """A writer that was killed may have left a part of a line, which the next one must not follow."""
    content = path.read_bytes()
    kept = content[: content.rfind(b"\n") + 1]
    if len(whole_lines(path)) > kept.count(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    elif kept != content:
        os.truncate(path, len(kept))


def _text(line: Line) -> str:
    """What is shown of a line while the command runs."""
    figure = line["us_p50"] if line["value"] is None else line["value"]
    unit = "us" if line["value"] is None else line["unit"]
    found = {True: "ok", False: "FAILED", None: ""}[line["ok"]] if figure is None else f"{figure:.4g} {unit}"
    return f"{line['stage']} {line['case']}: {line['error'] or found}".replace("\n", " ")[:160]
