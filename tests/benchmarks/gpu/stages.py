"""The stages of one run in the order of its plan, each within its seconds.

Invariant: every case that was asked for has a line: measured, failed, or not run with the reason; one that is done is left out.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

from tests.benchmarks.gpu.cases import PEERS_OPERATION, Case, kernel_cases
from tests.benchmarks.gpu.children import Supervisor, not_run
from tests.benchmarks.gpu.faults import Fault, described
from tests.benchmarks.gpu.outputs import Outputs
from tests.benchmarks.gpu.plans import Stage
from tests.benchmarks.gpu.record import Recorder
from tests.benchmarks.gpu.worker import buildable, run_build, run_kernels, run_probe

DRY_SLOWER = 6.0
"""Dry, a stage may take so many times its seconds: a CPU interprets what a GPU runs."""
MAX_SHARE = 0.4
"""Of a stage's seconds that one of several cases in one process may take before it counts as hung."""
MAX_CASE_S = 60.0
JOB_SHARE = 0.9
"""Of its seconds that must be left for a job to begin: those before it may have taken all of theirs and a little more."""
DRY_TESTS = 4
RESOURCES = ("regs", "stack", "shared", "compile_s")
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for. `only`: parts of names of cases, tests and jobs, none for all."""

    plan: Sequence[Stage]
    only: Sequence[str] = ()

    def has(self, work: str) -> bool:
        """Whether this piece of work, `kind/name`, was asked for."""
        return not self.only or any(part in work for part in self.only)


@dataclass(slots=True)
class Run:
    """One command's work. It began at `began` and ends by `deadline`, both of the monotonic clock. What is `done` is left out."""

    choice: Choice
    done: set[str]
    is_dry: bool
    began: float
    deadline: float
    recorder: Recorder
    context: BaseContext
    outputs: Outputs
    supervisor: Supervisor = field(init=False)
    _until: float = field(init=False)
    _resources: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.context)
        self._until = self.deadline
        for line in self.recorder.lines:
            self._note(line)

    def all_stages(self) -> None:
        """Run what was asked for, then count the processes that ended early. A stage that raises costs no other."""
        begins = self.began
        for stage in self.choice.plan:
            self._until = min(begins + self._seconds(stage), self.deadline)
            try:
                self._stage(stage)
            except Exception as error:  # noqa: BLE001 - written down as the stage's result
                failed = {"ok": False, "error": described(error, Fault.FAILED)}
                self.recorder.add({"stage": "run", "case": stage.name} | failed)
            begins = time.monotonic()
        restarts = {"value": float(self.supervisor.restarts), "unit": "processes"}
        self.recorder.add({"stage": "run", "case": "restarts", "ok": True} | restarts)

    def _seconds(self, stage: Stage) -> float:
        return stage.seconds * (DRY_SLOWER if self.is_dry else 1.0)

    def _stage(self, stage: Stage) -> None:
        work: dict[str, Callable[[Stage], None]] = {
            "probe": lambda stage: self._follow(stage, "probe", run_probe, names=["probe"]),
            "build": lambda stage: self._follow(stage, "build", run_build, names=self._built_cases()),
            "check": lambda stage: self._kernels(stage, "check", self._cases(stage.tier)),
            "time": lambda stage: self._kernels(stage, "time", self._cases(stage.tier)),
            "peers": lambda stage: self._kernels(stage, "time", self._cases(None)),
            "sweep": self._sweeps,
            "tests": self._tests,
            "job": self._job,
        }
        work[stage.kind](stage)

    def _built_cases(self) -> list[str]:
        """Kernels of cases that are still checked or timed, and those of the engine while a job is left."""
        kernels = {case.name for case in kernel_cases(is_dry=self.is_dry)}
        has_job = any(stage.kind == "job" and self._is_left("job", stage.name) for stage in self.choice.plan)
        return [
            name
            for name in buildable(is_dry=self.is_dry)
            if (has_job and name not in kernels)
            or (name in kernels and any(self._is_left(kind, name) for kind in ("check", "time")))
        ]

    def _is_left(self, kind: str, name: str) -> bool:
        """Whether this piece of work is still to be done."""
        work = f"{kind}/{name}"
        return self.choice.has(work) and work not in self.done

    def _kernels(self, stage: Stage, kind: str, cases: Sequence[Case]) -> None:
        self._follow(stage, kind, run_kernels, kind, names=[case.name for case in cases])

    def _cases(self, tier: int | None) -> list[Case]:
        """Of a tier; None for those of other libraries, which are timed alone."""
        return [
            case
            for case in kernel_cases(is_dry=self.is_dry)
            if (case.tier == tier and case.operation != PEERS_OPERATION)
            or (tier is None and case.operation == PEERS_OPERATION)
        ]

    def _tests(self, stage: Stage) -> None:
        # Imported here, like the engine below: kernels can be measured without what these need.
        from tests.benchmarks.gpu.pytest_stage import ALONE, FILES, NAMED, collect_tests, run_tests

        every = FILES if stage.name == "all tests" else NAMED
        targets = [target for target in every if self.choice.has(target)] or every
        limits = {"collection": self._seconds(stage)}
        names = []
        for line in self.supervisor.run(
            collect_tests, self.is_dry, targets, limits=limits, until=self._until
        ):
            if line["stage"] == "tests":
                names.append(line["case"])
            elif not line["ok"]:
                self.recorder.add(line | {"work": None, "final": False})
        # Without a GPU each of them is skipped: a few show that they begin.
        names = names[: DRY_TESTS if self.is_dry else None]
        beside = [name for name in names if not name.startswith(ALONE)]
        self._follow(stage, "tests", run_tests, names=beside)
        alone = [name for name in names if name.startswith(ALONE)]
        self._follow(stage, "tests", run_tests, names=alone, processes=1)

    def _job(self, stage: Stage) -> None:
        from tests.benchmarks.gpu.jobs import every_job, run_model

        job = next(job for job in every_job(self.outputs.folder) if job.name == stage.name)
        if not self._is_left("job", job.name):
            return
        left = self.deadline - time.monotonic()
        if self.is_dry and not job.runs_dry:
            self.recorder.add(not_run(job.name, "dry, another job is like it"))
        elif left < JOB_SHARE * stage.seconds and not self.is_dry:
            self.recorder.add(
                not_run(job.name, f"it may take {stage.seconds:.0f} s, and {left:.0f} are left")
            )
        else:
            folder = str(self.outputs.folder)
            self._follow(stage, "job", run_model, folder, names=[job.name])
            for name, reason in self.outputs.drop_unfit(self.recorder.path):
                self.recorder.add(not_run(f"file {name}", f"dropped: {reason}"))

    def _sweeps(self, stage: Stage) -> None:
        from tests.benchmarks.gpu.sweeps import every_value, run_sweep

        for index, value, cases in every_value(is_dry=self.is_dry):
            self._follow(stage, "sweep", run_sweep, index, value, names=[*cases])

    def _follow(
        self,
        stage: Stage,
        kind: str,
        target: Callable[..., None],
        *arguments: Any,
        names: Sequence[str],
        processes: int | None = None,
    ) -> None:
        """Run those of the named cases that are still to be done, within the stage's time, and keep their lines."""
        wanted = [name for name in names if self._is_left(kind, name)]
        if not wanted:
            return
        limit = self._seconds(stage)
        # One that is compiled holds up its own process alone.
        if len(wanted) > 1 and stage.kind != "build":
            limit = min(MAX_SHARE * limit, MAX_CASE_S)
        limits = dict.fromkeys(wanted, limit)
        cores = len(os.sched_getaffinity(0))
        processes = min(cores, processes or stage.processes or cores)
        for line in self.supervisor.run(
            target, self.is_dry, *arguments, limits=limits, until=self._until, processes=processes
        ):
            if line.get("work") is not None:
                line["work"] = f"{kind}/{line['work']}"
                if line.get("final"):
                    self.done.add(line["work"])
            self._add(line)

    def _add(self, line: Line) -> None:
        """Write a line, with the most that any kernel of its case takes where that was built."""
        self._note(line)
        taken = {} if line["stage"] == "build" else self._resources.get(line["case"], {})
        self.recorder.add(taken | line)

    def _note(self, line: Line) -> None:
        if line["stage"] == "build":
            known = self._resources.setdefault(line["case"], {})
            for name in RESOURCES:
                if line.get(name) is not None:
                    known[name] = max(known.get(name, 0.0), line[name])
