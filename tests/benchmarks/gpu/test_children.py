"""Processes that die, hang, raise or lose their device: each costs its own case, and the next one has a new process."""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.gpu import faults
from tests.benchmarks.gpu.children import MAX_RESTARTS, Supervisor, forking_context, lines_of, start
from tests.benchmarks.gpu.worker import Results

CPU = torch.device("cpu")
SHORT_S = 1.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this file by its name from the root, as the command does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def case(results: Results, name: str) -> Iterator[dict[str, Any]]:
    """A case that does what its name says."""
    if name.startswith("dies"):
        os._exit(7)
    if name.startswith("hangs"):
        time.sleep(600)
    if name.startswith("raises"):
        raise ValueError("wrong shape")
    if name.startswith("misses"):
        raise ModuleNotFoundError("No module named 'gemlite'", name="gemlite")
    if name.startswith("breaks"):
        # As after an illegal access: from now on no call of this process's context succeeds.
        faults.answers = lambda device: False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    yield {"case": name, "ok": faults.answers(CPU), "pid": os.getpid()}


def work(connection: Connection, names: Sequence[str]) -> None:
    """A worker as the harness has them, over cases that do what their names say."""
    results = Results(connection)
    for name in names:
        results.begin(name)
        faults.attempt(results, {"stage": "time", "case": name}, case(results, name), CPU)


def never_begins(connection: Connection, names: Sequence[str]) -> None:
    raise SystemExit(3)


def supervised(
    *names: str, target: Any = work, seconds: float = 300.0, hang_s: float = SHORT_S
) -> tuple[dict[str, Any], Supervisor]:
    """The last line of each case."""
    supervisor = Supervisor(forking_context(is_dry=False), time.monotonic() + seconds)
    limits = {name: hang_s if name.startswith("hangs") else 120.0 for name in names}
    return {line["case"]: line for line in supervisor.run(target, limits=limits)}, supervisor


def test_lines_of_all_children_come() -> None:
    context = forking_context(is_dry=False)
    shares = (["a", "b"], ["c", "d", "e"])
    children = [start(context, work, share, limits=dict.fromkeys(share, 60.0)) for share in shares]
    assert {line["case"] for line in lines_of(children) if line["ok"]} == set("abcde")
    assert [child.current for child in children] == ["b", "e"]


def test_each_fault_costs_its_own_case() -> None:
    names = ("first", "dies", "second", "hangs", "third", "raises", "fourth", "misses", "breaks", "last")
    lines, supervisor = supervised(*names)
    assert [name for name in names if lines[name]["ok"]] == ["first", "second", "third", "fourth", "last"]
    assert {name: lines[name]["error"].partition(" at ")[0] for name in names if not lines[name]["ok"]} == {
        "dies": "the process ended with 7",
        "hangs": "killed: it took longer than its limit",
        "raises": "failed: ValueError",
        "misses": "not installed: ModuleNotFoundError",
        "breaks": "device lost: RuntimeError",
    }
    assert lines["misses"]["ok"] is None and lines["breaks"]["ok"] is False
    # After those that died, hung and lost the device; not after what was only raised.
    assert supervisor.restarts == 3
    pids = [lines[name]["pid"] for name in ("third", "fourth")]
    assert pids[0] == pids[1] != lines["last"]["pid"]


def test_no_case_is_without_a_line_when_processes_only_die() -> None:
    names = [f"dies {index}" for index in range(MAX_RESTARTS + 3)]
    lines, supervisor = supervised(*names)
    assert supervisor.restarts == MAX_RESTARTS
    assert [lines[name]["ok"] for name in names] == [False] * (MAX_RESTARTS + 1) + [None] * 2
    assert lines[names[-1]]["error"] == "not run: its process could not go on"


def test_a_process_that_never_begins_is_not_tried_again() -> None:
    lines, supervisor = supervised("a", "b", target=never_begins)
    assert lines["start of a process"]["error"] == "the process ended with 3"
    assert lines["a"]["ok"] is lines["b"]["ok"] is None and supervisor.restarts == 0


def test_nothing_lives_past_the_deadline() -> None:
    lines, _ = supervised("hangs", "a", seconds=2.0, hang_s=120.0)
    assert lines["a"]["error"] == "not run: no time was left"
    assert not any(line["ok"] for line in lines.values())


def test_no_process_outlives_the_reading_of_its_lines() -> None:
    child = start(
        forking_context(is_dry=False), work, ["a", "hangs"], limits=dict.fromkeys(("a", "hangs"), 600.0)
    )
    lines = lines_of([child])
    assert isinstance(lines, Generator) and next(lines)["case"] == "a"
    lines.close()
    child.process.join(60.0)
    assert child.process.exitcode is not None
