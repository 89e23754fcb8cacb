"""Processes that die, hang, raise or lose their device: each costs its own case, and the next one has a new process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.benchmarks.gpu import faults
from tests.benchmarks.gpu.children import (
    END_S,
    MAX_RESTARTS,
    PRELOADED,
    Supervisor,
    forking_context,
)
from tests.benchmarks.gpu.worker import Results

CPU = torch.device("cpu")
SHORT_S = 1.0
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children import this file by its name from the root, as the command does."""
    monkeypatch.syspath_prepend(str(ROOT))


def case(results: Results, name: str) -> Iterator[dict[str, Any]]:
    """A case that does what its name says."""
    if name.startswith("dies"):
        os._exit(7)
    if name.startswith("hangs"):
        # As a process that no orderly request ends.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if name.startswith("raises"):
        raise ValueError("wrong shape")
    if name.startswith("misses"):
        raise ModuleNotFoundError("No module named 'gemlite'", name="gemlite")
    if name.startswith("breaks"):
        # As after an illegal access: from now on no call of this process's context succeeds.
        faults.answers = lambda device: False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    yield {"stage": "time", "case": name, "ok": faults.answers(CPU), "pid": os.getpid()}


def work(connection: Connection, names: Sequence[str]) -> None:
    """A worker as the harness has them, over cases that do what their names say."""
    results = Results(connection)
    for name in names:
        results.begin(name)
        faults.attempt(results, {"stage": "time", "case": name}, case(results, name), CPU)


def never_begins(connection: Connection, names: Sequence[str]) -> None:
    raise SystemExit(3)


def hangs_at_its_start(connection: Connection, names: Sequence[str]) -> None:
    """As in an import, or while CUDA begins."""
    time.sleep(600)


class Ran:
    """What a supervisor made of cases: the last line of each that is more than its end, and the ends."""

    def __init__(
        self,
        *names: str,
        target: Any = work,
        seconds: float = 300.0,
        hang_s: float = SHORT_S,
        processes: int = 1,
    ) -> None:
        self.supervisor = Supervisor(forking_context(is_dry=False))
        limits = {name: hang_s if name.startswith("hangs") else 120.0 for name in names}
        began = time.monotonic()
        self.all = [*self.supervisor.run(target, limits=limits, until=began + seconds, processes=processes)]
        self.seconds = time.monotonic() - began
        self.lines = {line["case"]: line for line in self.all if line["stage"] != "end"}
        self.final = {line["work"]: line["ok"] for line in self.all if line.get("final")}

    def reasons(self, *names: str) -> dict[str, str]:
        return {name: self.lines[name]["error"].partition(" at ")[0] for name in names}


def test_lines_of_all_processes_come() -> None:
    ran = Ran(*"abcde", processes=2)
    assert {name for name, line in ran.lines.items() if line["ok"]} == set("abcde")
    assert len({line["pid"] for line in ran.lines.values()}) == 2 and ran.supervisor.restarts == 0
    assert ran.final == dict.fromkeys("abcde", True)


def test_each_fault_costs_its_own_case() -> None:
    names = ("first", "dies", "second", "hangs", "third", "raises", "fourth", "misses", "breaks", "last")
    ran = Ran(*names)
    lines = ran.lines
    good = ["first", "second", "third", "fourth", "last"]
    assert [name for name in names if lines[name]["ok"]] == good
    assert ran.reasons("dies", "hangs", "raises", "misses", "breaks") == {
        "dies": "the process ended with 7",
        "hangs": "killed: it took longer than its 1 s",
        "raises": "failed: ValueError",
        "misses": "not installed: ModuleNotFoundError",
        "breaks": "device lost: RuntimeError",
    }
    # What is not installed here may be measured elsewhere; all others are done, each once.
    assert ran.final == {name: name in good for name in names} | {"misses": None}
    assert sum(bool(line.get("final")) for line in ran.all) == len(names)
    # After those that died, hung and lost the device; not after what was only raised.
    assert ran.supervisor.restarts == 3
    pids = [lines[name]["pid"] for name in ("third", "fourth")]
    assert pids[0] == pids[1] != lines["last"]["pid"]


def test_no_case_is_without_a_line_when_processes_only_die() -> None:
    names = [f"dies {index}" for index in range(MAX_RESTARTS + 3)]
    ran = Ran(*names)
    assert ran.supervisor.restarts == MAX_RESTARTS
    assert [ran.lines[name]["ok"] for name in names] == [False] * (MAX_RESTARTS + 1) + [None] * 2
    assert ran.lines[names[-1]]["error"] == "not run: its process could not go on"
    assert list(ran.final) == names[:-2]


def test_a_process_that_never_begins_is_not_tried_again() -> None:
    ran = Ran("a", "b", target=never_begins)
    assert ran.lines["start of a process"]["error"] == "the process ended with 3"
    assert ran.lines["a"]["ok"] is ran.lines["b"]["ok"] is None and ran.supervisor.restarts == 0
    assert not ran.final


def test_one_of_many_at_the_end_of_their_time_has_not_failed() -> None:
    ran = Ran("a", "hangs", "b", seconds=2.0, hang_s=120.0)
    assert ran.final == {"a": True} and ran.seconds < 2.0
    assert ran.reasons("hangs", "b") == dict.fromkeys(("hangs", "b"), "not run: its stage's time was over")


def test_one_that_had_all_the_time_has_failed() -> None:
    ran = Ran("hangs", seconds=2.0, hang_s=120.0)
    assert ran.final == {"hangs": False} and ran.seconds < 2.0
    assert ran.reasons("hangs") == {"hangs": "killed: it took longer than its stage's time"}


def test_a_start_that_hangs_costs_its_stage() -> None:
    ran = Ran("a", target=hangs_at_its_start, seconds=2.0)
    assert ran.seconds < 2.0 and not ran.final
    assert ran.lines["start of a process"]["error"] == "killed: it began no case in its stage's time"
    assert ran.lines["a"]["error"] == "not run: its stage's time was over"


def test_a_server_that_hangs_costs_its_stage_and_the_next_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an import, the first time that it is loaded."""
    (tmp_path / "hangs_once.py").write_text(
        f"import pathlib, time\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch()\n    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = forkserver.ForkServer()
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    monkeypatch.setattr(forkserver, "_forkserver", server)
    context = get_context("forkserver")
    forkserver.set_forkserver_preload(["hangs_once"])
    supervisor = Supervisor(context)
    began = time.monotonic()
    lines = [*supervisor.run(work, limits={"a": 60.0}, until=began + 2.0)]
    assert time.monotonic() - began < 2.0 + END_S
    assert [line["error"] for line in lines] == [
        "the server of processes hangs",
        "not run: its stage's time was over",
    ]
    lines = [*supervisor.run(work, limits={"a": 60.0}, until=time.monotonic() + 60.0)]
    assert [line["ok"] for line in lines] == [True, True]
    server._stop()  # type: ignore[attr-defined]


def test_no_process_outlives_the_reading_of_its_lines() -> None:
    supervisor = Supervisor(forking_context(is_dry=False))
    limits = dict.fromkeys(("a", "hangs"), 600.0)
    lines = supervisor.run(work, limits=limits, until=time.monotonic() + 60.0)
    assert isinstance(lines, Generator)
    pid = next(lines)["pid"]
    lines.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


ORPHAN = """
import time
from multiprocessing import get_context
from sleeper import sleep
from tests.benchmarks.gpu.children import Supervisor
for line in Supervisor(get_context("forkserver")).run(sleep, limits={"a": 60.0}, until=time.monotonic() + 60.0):
    print(line["pid"], flush=True)
"""
SLEEPER = """
import os, time
def sleep(connection, names):
    connection.send(("begin", names[0]))
    connection.send(("line", {"ok": True, "pid": os.getpid()}))
    time.sleep(600)
"""


def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    """One that is left behind would hold the GPU's memory."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    command = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f".src:.:{tmp_path}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    pid = int(command.stdout.readline())
    command.kill()
    command.wait()
    until = time.monotonic() + 20.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


ASKING = """
import importlib, sys, torch
def asked(*arguments):
    raise AssertionError("the server asked for a GPU")
for name in ("is_available", "device_count", "init", "_lazy_init", "get_device_properties"):
    setattr(torch.cuda, name, asked)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_what_the_server_loads_asks_for_no_gpu() -> None:
    """CUDA that has begun in the server would fail in all its forks."""
    environment = os.environ | {"PYTHONPATH": ".src:."}
    subprocess.run([sys.executable, "-c", ASKING, *PRELOADED], check=True, cwd=ROOT, env=environment)
