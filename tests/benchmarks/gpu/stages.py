"""The stages of one run, in the order in which a later one needs an earlier one.

Invariant: every case that was asked for has a line: measured, failed, or not run with the reason.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.cases import PEERS_OPERATION, TIERS, Case, kernel_cases
from tests.benchmarks.gpu.children import Supervisor, lines_of, not_run, start
from tests.benchmarks.gpu.faults import Fault, described
from tests.benchmarks.gpu.record import Recorder
from tests.benchmarks.gpu.worker import run_build, run_kernels, run_probe

MODEL_STAGES = ("engine", "whole")
STAGES = ("probe", "build", "check", "time", "tests", *MODEL_STAGES, "profile", "sweep", "peers")
PROBE_LIMIT_S = 120.0
BUILD_LIMIT_S = 120.0
BUILD_SHARE = 0.35
"""Of what is left: what is not built then is compiled where it runs."""
START_ESTIMATE_S = 10.0
DRY_TESTS = 4
RESOURCES = ("regs", "stack", "shared", "compile_s")
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for. `only`: parts of names of cases, tests and jobs; none for all. `out`: where traces go."""

    stages: Sequence[str]
    operations: Sequence[str]
    only: Sequence[str]
    out: Path

    def has(self, name: str) -> bool:
        """Whether a case, test or job of this name was asked for."""
        return not self.only or any(part in name for part in self.only)


@dataclass(slots=True)
class Run:
    """One command's work and what it found."""

    choice: Choice
    is_dry: bool
    deadline: float
    recorder: Recorder
    context: BaseContext
    supervisor: Supervisor = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.context, self.deadline)

    def all_stages(self) -> None:
        """Run what was asked for, then count the processes that ended early. A stage that raises costs no other."""
        for stages, work in self._works():
            if not stages.isdisjoint(self.choice.stages):
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - written down as the stage's result
                    name = ", ".join(sorted(stages))
                    failed = {"ok": False, "error": described(error, Fault.FAILED)}
                    self.recorder.add({"stage": "run", "case": name} | failed)
        restarts = {"value": float(self.supervisor.restarts), "unit": "processes"}
        self.recorder.add({"stage": "run", "case": "restarts", "ok": True} | restarts)

    def _works(self) -> Iterator[tuple[set[str], Callable[[], None]]]:
        """Which stages each piece of work is."""
        yield {"probe"}, lambda: self._follow(run_probe, limits={"probe": PROBE_LIMIT_S})
        yield {"build"}, self._build
        yield {"check", "time"}, self._check_and_time
        yield {"tests"}, self._tests
        for stage in (*MODEL_STAGES, "profile"):
            yield {stage}, partial(self._models, stage)
        yield {"sweep"}, self._sweeps
        yield {"peers"}, self._peers

    def _peers(self) -> None:
        for tier in TIERS:
            self._kernels([PEERS_OPERATION], ["time"], tier)

    def _build(self) -> None:
        names = [case.name for case in self._cases() if case.is_compiled]
        processes = 1 if self.is_dry else len(os.sched_getaffinity(0))
        until = self.deadline - (1 - BUILD_SHARE) * self.supervisor.left
        limits = dict.fromkeys(names, BUILD_LIMIT_S)
        shares = [names[first::processes] for first in range(processes)]
        children = [
            start(self.context, run_build, self.is_dry, share, limits=limits) for share in shares if share
        ]
        for line in lines_of(children, until):
            self.recorder.add(line)

    def _check_and_time(self) -> None:
        stages = [stage for stage in ("check", "time") if stage in self.choice.stages]
        for tier in TIERS:
            # What is interpreted cannot break its device.
            for together in (
                [self.choice.operations] if self.is_dry else [[name] for name in self.choice.operations]
            ):
                self._kernels(together, stages, tier)

    def _kernels(self, operations: Sequence[str], stages: Sequence[str], tier: int) -> None:
        cases = [case for case in self._cases() if case.operation in operations and case.tier == tier]
        fitting = self._fitting({case.name: case.seconds for case in cases})
        limits = {case.name: case.limit_s for case in cases if case.name in fitting}
        self._follow(run_kernels, stages, limits=limits)

    def _cases(self) -> list[Case]:
        return [case for case in kernel_cases(is_dry=self.is_dry) if self.choice.has(case.name)]

    def _tests(self) -> None:
        # Imported here, like the engine below: kernels can be measured without what these need.
        from tests.benchmarks.gpu.pytest_stage import FILES, TEST_LIMIT_S, collect_tests, run_tests

        files = [name for name in FILES if self.choice.has(name)] or [*FILES]
        child = start(self.context, collect_tests, self.is_dry, files, limits={files[0]: TEST_LIMIT_S})
        names = []
        for line in lines_of([child], self.deadline):
            if line["stage"] == "tests":
                names.append(line["case"])
            else:
                self.recorder.add(line)
        chosen = [name for name in names if self.choice.has(name)]
        # Without a GPU each of them is skipped: a few show that they begin.
        self._follow(
            run_tests, files, limits=dict.fromkeys(chosen[: DRY_TESTS if self.is_dry else None], TEST_LIMIT_S)
        )

    def _models(self, stage: str) -> None:
        from tests.benchmarks.gpu.jobs import every_job, run_model

        for job in every_job(self.choice.out):
            if job.stage != stage or not self.choice.has(job.name) or (self.is_dry and not job.runs_dry):
                continue
            if self._fitting({job.name: job.seconds}):
                limits = {job.name: job.limit_s}
                self._follow(run_model, str(self.choice.out), limits=limits)

    def _sweeps(self) -> None:
        from tests.benchmarks.gpu.sweeps import every_value, run_sweep

        for index, value, cases in every_value(is_dry=self.is_dry):
            chosen = {name: case for name, case in cases.items() if self.choice.has(name)}
            fitting = self._fitting({name: case.seconds for name, case in chosen.items()})
            limits = {name: cases[name].limit_s for name in fitting}
            self._follow(run_sweep, index, value, limits=limits)

    def _fitting(self, seconds: Mapping[str, float]) -> set[str]:
        """Which of them are done before the deadline, by their estimates; the others get their lines. Dry, all."""
        left, fitting = self.supervisor.left - START_ESTIMATE_S, set()
        for name, estimate in seconds.items():
            if self.is_dry or estimate <= left:
                left -= estimate
                fitting.add(name)
            else:
                self.recorder.add(not_run(name, "it does not fit the budget"))
        return fitting

    def _follow(self, target: Callable[..., None], *arguments: Any, limits: Mapping[str, float]) -> None:
        """Run the cases named in `limits` to their end, and keep their lines."""
        for line in self.supervisor.run(target, self.is_dry, *arguments, limits=limits):
            self.recorder.add(self._with_resources(line))

    def _with_resources(self, line: Line) -> Line:
        """The line, with the most that any kernel of its case takes, where that was built."""
        known = {name: list(self._built(line["case"], name)) for name in RESOURCES}
        return {name: max(values) for name, values in known.items() if values} | line

    def _built(self, case: str, name: str) -> Iterator[float]:
        for line in self.recorder.lines:
            if line["stage"] == "build" and line["case"] == case and line[name] is not None:
                yield line[name]
