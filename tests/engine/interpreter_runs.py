"""Tests under Triton's interpreter, which is chosen before Triton is imported and so needs a process of its own.

Invariant: the files of one run share two processes, one per core, started when the first of them is asked for. Where test
files run side by side already, each has a process of its own, started when it is asked for.
"""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = 2
TIMEOUT_S = 900
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ


@dataclass
class Job:
    """Targets of one process, with the seconds they are known to take."""

    targets: list[str] = field(default_factory=list)
    seconds: float = 0.0


class InterpreterRuns:
    """What the marked tests of this session name, interpreted: `@pytest.mark.interpreted(*targets, seconds=...)`.

    A target is a file, or a test of one as pytest names it.
    """

    def __init__(self, marks: list[pytest.Mark], folder: Path) -> None:
        jobs = [Job() for _ in range(PROCESSES)]
        self._runs: dict[str, Future[dict[str, list[str]]]] = {}
        self._folder = folder
        self._executor = ThreadPoolExecutor(PROCESSES)
        for mark in sorted(marks, key=lambda mark: -float(mark.kwargs["seconds"])):
            job = min(jobs, key=lambda job: job.seconds)
            job.targets += mark.args
            job.seconds += float(mark.kwargs["seconds"])
        for job in jobs:
            if job.targets:
                self._start(job.targets)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

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
        report = self._folder / f"interpreted-{len(self._runs)}.xml"
        self._runs |= dict.fromkeys(targets, self._executor.submit(self._run, report, targets))

    def _run(self, report: Path, targets: list[str]) -> dict[str, list[str]]:
        """By file, one entry per test that ran: empty, or why it failed."""
        options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu", "-o", "junit_family=xunit1"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *targets],
            check=False,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode in (0, 1), done.stdout[-8000:] + done.stderr[-2000:]
        outcomes: dict[str, list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                messages = [
                    part.text or part.tag for kind in ("failure", "error") for part in case.iter(kind)
                ]
                outcomes.setdefault(case.attrib["file"], []).append("\n".join(messages))
        return outcomes
