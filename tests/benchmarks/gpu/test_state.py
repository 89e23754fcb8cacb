"""Lines of earlier runs: what is done by them, which of them count, and files that a killed writer left behind."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu.record import FIELDS, FILE, Recorder
from tests.benchmarks.gpu.state import card_of, counted, done, read_lines

HEAD: dict[str, Any] = {"run": "r2", "hardware": {"gpu": "NVIDIA H100"}, "cache": "here", "commit": "c"}


def line(work: str | None, *, run: str = "r1", stage: str = "time", **named: Any) -> dict[str, Any]:
    named = {"case": work, "ok": True, "final": False, "dry": False} | named
    return dict.fromkeys(FIELDS) | HEAD | {"run": run, "stage": stage, "work": work} | named


def end(work: str, run: str = "r1", **named: Any) -> dict[str, Any]:
    return line(work, run=run, stage="end", final=True, **named)


def test_what_came_to_its_end_is_done() -> None:
    lines = [
        *(line("job/swap", value=1.0), end("job/swap")),
        line("job/zipf", value=1.0),
        line("check/a", stage="run", ok=False, final=True, error="killed"),
        line("check/b", stage="run", ok=None, error="not run: its stage's time was over"),
        end("time/humming", ok=None),
        *(end("build/here"), end("build/there", cache="there")),
    ]
    assert done(lines, "here") == {"job/swap", "check/a", "build/here"}
    assert done(lines, "here", ("swap", "check/")) == {"build/here"}


def test_a_piece_of_work_counts_once() -> None:
    """With the lines of the last run of it that came to its end; partial ones count until there is one."""
    partial = [line("job/swap", value=1.0)]
    assert counted(partial) == partial
    later = [line("job/swap", run="r2", ok=None, error="not run")]
    assert counted(partial + later) == partial
    whole = [line("job/swap", run="r3", value=2.0), end("job/swap", "r3")]
    assert counted(partial + later + whole) == whole[:1]
    cut_off = [line("job/swap", run="r4", value=3.0)]
    assert counted(partial + whole + cut_off) == whole[:1]
    again = [line("job/swap", run="r5", value=4.0), end("job/swap", "r5")]
    assert counted(whole + cut_off + again) == again[:1]


def test_lines_of_no_work_are_those_of_the_last_run() -> None:
    lines = [line(None, stage="run", value=3.0), line(None, run="r2", stage="run", value=0.0)]
    assert counted(lines) == lines[1:]


def test_cards_are_apart() -> None:
    assert card_of(line("a")) == "NVIDIA H100" and card_of(line("a", dry=True)) == "dry"


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_last_line_is_skipped_and_never_followed(cut: int, tmp_path: Path) -> None:
    path = tmp_path / FILE
    whole = "".join(json.dumps(line(name)) + "\n" for name in ("a", "b"))
    path.write_text(whole + json.dumps(line("c"))[:-cut])
    assert [line["work"] for line in read_lines([path])] == ["a", "b"]
    recorder = Recorder(tmp_path, HEAD, is_dry=False)
    recorder.add({"stage": "time", "case": "d", "ok": True, "work": "d", "final": False})
    assert [line["work"] for line in read_lines([path])] == ["a", "b", "d"]


def test_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(json.dumps(line("a")) + "\n" + json.dumps(line("b")))
    Recorder(tmp_path, HEAD, is_dry=False).add({"stage": "time", "case": "c", "ok": True, "work": "c"})
    assert [line["work"] for line in read_lines([path])] == ["a", "b", "c"]


def test_a_line_torn_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text('{"work"\n' + json.dumps(line("a")) + "\n")
    with pytest.raises(ValueError, match=r"gpu\.jsonl, line 1"):
        read_lines([path])


def test_a_line_of_two_files_counts_once(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(line("a")) + "\n")
    assert len(read_lines([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])) == 1
