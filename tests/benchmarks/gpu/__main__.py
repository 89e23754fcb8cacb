"""`python -m tests.benchmarks.gpu --stages probe,build,check,time --budget SECONDS --out DIR`: one command for a GPU at hand.

Invariant: nothing starts whose estimate does not fit the budget, and whatever was measured is on disk when something dies.
Without a GPU every stage runs as a dry run: tiny shapes, kernels interpreted.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
from tests.benchmarks.gpu.cases import OPERATIONS, TIERS, Case, kernel_cases
from tests.benchmarks.gpu.children import forking_context, lines_of, start
from tests.benchmarks.gpu.demands import verdicts
from tests.benchmarks.gpu.record import Recorder, table
from tests.benchmarks.gpu.worker import run_build, run_kernels, run_probe

STAGES = ("probe", "build", "check", "time")
START_S = 15.0
"""Of a process, until its first case: torch's and CUDA's beginnings."""
PATIENCE = 4.0
"""A process may take so many times its estimate before it counts as hung."""
PROBE_S = 60.0
BUILD_SHARE = 0.35
MAX_RESTARTS = 8
RESOURCES = ("regs", "stack", "shared", "compile_s")


@dataclass(slots=True)
class Run:
    """One command's work and what it found."""

    stages: Sequence[str]
    operations: Sequence[str]
    is_dry: bool
    deadline: float
    recorder: Recorder
    context: BaseContext

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def all_stages(self) -> None:
        """In the order in which a later one needs an earlier one."""
        if "probe" in self.stages:
            self._follow(run_probe, seconds=min(PROBE_S, self.left))
        if "build" in self.stages:
            self._build()
        for tier in TIERS:
            # What is interpreted cannot kill its process.
            for together in [self.operations] if self.is_dry else [[name] for name in self.operations]:
                self._kernels(together, tier)
            if tier == 1 and "time" in self.stages and "model" in self.operations:
                self._models()

    def _build(self) -> None:
        processes = 1 if self.is_dry else len(os.sched_getaffinity(0))
        seconds = self.left * BUILD_SHARE
        children = [
            start(self.context, run_build, self.is_dry, first, processes, seconds=seconds)
            for first in range(processes)
        ]
        for line in lines_of(children):
            self.recorder.add(line)

    def _kernels(self, operations: Sequence[str], tier: int) -> None:
        stages = [stage for stage in ("check", "time") if stage in self.stages]
        cases = [
            case
            for case in kernel_cases(is_dry=self.is_dry)
            if case.operation in operations and case.tier == tier
        ]
        if not stages or not cases:
            return
        fitting = list(self._fitting(cases))
        if len(fitting) < len(cases):
            print(
                f"{', '.join(operations)}: {len(cases) - len(fitting)} cases of tier {tier} do not fit the budget"
            )
        names = [case.name for case in fitting]
        seconds = START_S + PATIENCE * sum(case.seconds for case in fitting)
        for _ in range(MAX_RESTARTS):
            if not names or self.left < START_S:
                return
            begun = self._follow(run_kernels, names, stages, seconds=min(seconds, self.left))
            names = [name for name in names if name not in begun]

    def _fitting(self, cases: Sequence[Case]) -> Iterator[Case]:
        left = self.left - START_S
        for case in cases:
            if case.seconds <= left:
                left -= case.seconds
                yield case

    def _models(self) -> None:
        # Imported here: kernels can be measured without what the engine needs.
        from tests.benchmarks.gpu.jobs import MODEL_JOBS, run_model

        for job in MODEL_JOBS:
            if self.is_dry and not job.runs_dry:
                continue
            if not self.is_dry and job.seconds > self.left:
                print(f"{job.name}: does not fit the budget")
            else:
                seconds = self.left if self.is_dry else min(self.left, 2 * job.seconds + START_S)
                self._follow(run_model, job.name, seconds=seconds)

    def _follow(self, target: Callable[..., None], *arguments: Any, seconds: float) -> list[str]:
        """Run a child to its end; what it began."""
        child = start(self.context, target, self.is_dry, *arguments, seconds=seconds)
        for line in lines_of([child]):
            self.recorder.add(self._with_resources(line))
        return child.begun

    def _with_resources(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line, with the most that any kernel of its case takes, where that was built."""
        built = [
            one for one in self.recorder.lines if one["stage"] == "build" and one["case"] == line["case"]
        ]
        known = {name: [one[name] for one in built if one[name] is not None] for name in RESOURCES}
        return {name: max(values) for name, values in known.items() if values} | line


def main(arguments: Sequence[str]) -> int:
    """Run the stages, print the table; 1 if any check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all of it")
    parser.add_argument(
        "--out", type=Path, default=Path("tests/benchmarks/results"), help="folder of the lines"
    )
    parser.add_argument("--operations", default=",".join((*OPERATIONS, "model")), help="which, in order")
    parser.add_argument(
        "--dry", action="store_true", help="tiny shapes on the CPU, also where there is a GPU"
    )
    asked = parser.parse_args(arguments)
    stages, operations = asked.stages.split(","), asked.operations.split(",")
    for name, known in ((stages, STAGES), (operations, (*OPERATIONS, "model"))):
        if not set(name) <= set(known):
            parser.error(f"allowed are {', '.join(known)}")
    began = time.monotonic()
    is_dry = asked.dry or not torch.cuda.is_available()
    recorder = Recorder(asked.out, is_dry=is_dry, driver=_driver())
    run = Run(stages, operations, is_dry, began + asked.budget, recorder, forking_context(is_dry=is_dry))
    run.all_stages()
    print("\n".join(table(recorder.lines, verdicts(recorder.lines))))
    print(f"{time.monotonic() - began:.0f} s, {recorder.path}")
    return int(any(line["ok"] is False for line in recorder.lines))


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
