"""Tests under Triton's interpreter, which is chosen before Triton is imported and so needs a process of its own.

Invariant: the files of one run share two processes, one per core, which start on all of them when the first is asked for.
Where test files run side by side already, each worker has one process, which runs a file when it is asked for.
"""

import json
import os
import select
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
# The interpreter multiplies tiles by OpenBLAS. Its kernels for some processors (Haswell, Zen) round a row by its place in the tile,
# as no kernel on a GPU does; this one, which all x86-64 processors run, treats all rows alike.
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
PROCESSES = 2
TIMEOUT_S = 900
LONG_TIMEOUT_S = 3600
"""Of a run with `--long`, which has every pair of settings of the pretended device."""
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ
OPTIONS = ("-q", "-p", "no:cacheprovider", "-m", "not gpu", "-o", "junit_family=xunit1")


@dataclass
class Job:
    """Targets of one process, with the seconds they are known to take."""

    targets: list[str] = field(default_factory=list)
    seconds: float = 0.0


class InterpreterProcess:
    """One process that has imported everything `targets` import. `is_long`: it runs what is marked as long, too."""

    def __init__(self, targets: list[str], log: Path, *, is_long: bool) -> None:
        self._log = log
        self._options = [*OPTIONS, "--long"] if is_long else [*OPTIONS]
        self._timeout_s = LONG_TIMEOUT_S if is_long else TIMEOUT_S
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.interpreter_process", *targets],
                env=os.environ | INTERPRETED,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                bufsize=0,
            )
        assert self._answer() == "ready", self._printed()

    def run(self, report: Path, targets: list[str]) -> dict[str, list[str]]:
        """By file, one entry per test that ran: empty, or why it failed."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps([*self._options, f"--junitxml={report}", *targets]).encode() + b"\n")
        assert self._answer() in ("0", "1"), self._printed()
        outcomes: dict[str, list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                messages = [
                    part.text or part.tag for kind in ("failure", "error") for part in case.iter(kind)
                ]
                outcomes.setdefault(case.attrib["file"], []).append("\n".join(messages))
        return outcomes

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], self._timeout_s)[0]:
            self._process.kill()
        return stdout.readline().decode().strip()

    def _printed(self) -> str:
        return self._log.read_text(errors="replace")[-8000:]


class InterpreterRuns:
    """What the marked tests of this session name, interpreted: `@pytest.mark.interpreted(*targets, seconds=...)`.

    A target is a file, or a test of one as pytest names it.
    """

    def __init__(self, marks: list[pytest.Mark], folder: Path, *, is_long: bool) -> None:
        self._folder = folder
        self._is_long = is_long
        self._targets = [target for mark in marks for target in mark.args]
        self._runs: dict[str, Future[dict[str, list[str]]]] = {}
        self._processes: list[InterpreterProcess] = []
        self._executor = ThreadPoolExecutor(1 if SIDE_BY_SIDE else PROCESSES)
        if SIDE_BY_SIDE:
            return
        jobs = [Job() for _ in range(PROCESSES)]
        for mark in sorted(marks, key=lambda mark: -float(mark.kwargs["seconds"])):
            job = min(jobs, key=lambda job: job.seconds)
            job.targets += mark.args
            job.seconds += float(mark.kwargs["seconds"])
        for job in jobs:
            if job.targets:
                self._start(job.targets)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def passed(self, node: pytest.Item) -> int:
        """How many tests of `node`'s targets passed; fails with what others printed."""
        mark = node.get_closest_marker("interpreted")
        assert mark is not None
        if not self._runs.keys() >= set(mark.args):
            self._start([*mark.args])
        total = 0
        for target in mark.args:
            file = str(Path(target.partition("::")[0]).relative_to(ROOT))
            outcomes = self._runs[target].result().get(file, [])
            failures = [outcome for outcome in outcomes if outcome]
            assert not failures, "\n\n".join(failures)[-8000:]
            total += len(outcomes)
        return total

    def _start(self, targets: list[str]) -> None:
        self._runs |= dict.fromkeys(targets, self._executor.submit(self._run, targets))

    def _run(self, targets: list[str]) -> dict[str, list[str]]:
        name = uuid4().hex
        if SIDE_BY_SIDE and self._processes:
            (process,) = self._processes
        else:
            known = self._targets if SIDE_BY_SIDE else targets
            process = InterpreterProcess(known, self._folder / f"{name}.log", is_long=self._is_long)
            self._processes.append(process)
        return process.run(self._folder / f"{name}.xml", targets)
