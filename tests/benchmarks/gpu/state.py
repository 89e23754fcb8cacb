"""What lines of earlier runs say: which pieces of work are done, and which lines count.

Invariant: every piece of work counts once, with the lines of one run of it: the last that came to its end.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """The lines of several files, in their order; one that stands in two files counts once.

    A killed writer may leave a part of a file's last line, which is skipped. Raises `ValueError` for any other that is no JSON.
    """
    texts = dict.fromkeys(text for path in paths for text in whole_lines(path))
    return [json.loads(text) for text in texts]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file without a torn last one. Raises `ValueError` for one that is torn elsewhere."""
    texts = path.read_text(errors="replace").splitlines()
    for index, text in enumerate(texts):
        try:
            json.loads(text)
        except ValueError as error:
            if index < len(texts) - 1:
                raise ValueError(f"{path}, line {index + 1}: {error}") from error
            return texts[:-1]
    return texts


def card_of(line: Line) -> str:
    """What was measured on: the name of the GPU, or that the run was dry."""
    return "dry" if line["dry"] else str(line["hardware"]["gpu"])


def done(lines: Iterable[Line], cache: str | None, again: Sequence[str] = ()) -> set[str]:
    """Pieces of work that came to their end. `lines` are of one card; `again`: parts of names that are run once more.

    What was built counts where it lies in Triton's cache: `cache` names that of this machine.
    """
    return {
        line["work"]
        for line in lines
        if line["final"]
        and line["ok"] is not None
        and (line["cache"] == cache or not line["work"].startswith("build/"))
        and not any(part in line["work"] for part in again)
    }


def counted(lines: Sequence[Line]) -> list[Line]:
    """Of each piece of work the lines of one run: the last that came to its end, else the last with figures, else the last.

    Lines of no piece of work are those of the last run. Those that only end a piece of work are left out.
    """
    order = {run: place for place, run in enumerate(dict.fromkeys(line["run"] for line in lines))}
    ranks: dict[tuple[str | None, str], tuple[bool, bool, int]] = {}
    for line in lines:
        key = line["work"], line["run"]
        is_final, is_known, _ = ranks.get(key, (False, False, 0))
        ends = bool(line["final"]) and line["ok"] is not None
        ranks[key] = is_final or ends, is_known or line["ok"] is not None, order[line["run"]]
    best: dict[str | None, tuple[tuple[bool, bool, int], str]] = {}
    last = max(order.values(), default=0)
    for (work, run), rank in ranks.items():
        if work is None and order[run] != last:
            continue
        best[work] = max(best.get(work, (rank, run)), (rank, run))
    chosen = {work: run for work, (_, run) in best.items()}
    return [line for line in lines if chosen.get(line["work"]) == line["run"] and line["stage"] != "end"]
