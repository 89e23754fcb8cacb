"""What runs in a process of its own: an illegal access ends that process, and nothing else.

Invariant: before anything is tried its name is sent, so that the parent knows what ended the process.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.check import check
from tests.benchmarks.gpu.faults import attempt
from tests.benchmarks.gpu.probe import probe
from tests.benchmarks.kernels import clock
from tests.benchmarks.kernels.clock import copy_rate, sets_of, time_calls
from tests.benchmarks.kernels.problem import Problem, RandomTensors

from loraplex.engine.kernels import dispatch

DRY_COPY_BYTES = 1 << 20
CPU = torch.device("cpu")
Line = dict[str, Any]


class Results:
    """The parent's end of the pipe, seen from here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, name: str) -> None:
        self._connection.send(("begin", name))

    def line(self, line: Line) -> None:
        self._connection.send(("line", line))


def run_probe(connection: Connection, is_dry: bool, names: Sequence[str]) -> None:
    """The stage `probe`: one case."""
    results, device = Results(connection), device_of(is_dry)
    for name in names:
        results.begin(name)
        attempt(results, {"stage": "probe", "case": name}, probe(device, is_dry=is_dry), device)


def buildable(*, is_dry: bool) -> dict[str, Callable[[], Iterator[Line]]]:
    """What the stage `build` compiles, by name, in order of value: kernels of the first tier, the engine's, all others."""
    from tests.benchmarks.gpu.build import build
    from tests.benchmarks.gpu.build_engines import engine_builds

    cases = [case for case in kernel_cases(is_dry=is_dry) if case.is_compiled]
    first, others = (
        {case.name: partial(build, case.problem) for case in cases if (case.tier == 1) is is_first}
        for is_first in (True, False)
    )
    return first | engine_builds(is_dry=is_dry) | others


def run_build(connection: Connection, is_dry: bool, names: Sequence[str]) -> None:
    """The stage `build` of the named cases, compiled as on an H200 but never launched."""
    results, known = Results(connection), buildable(is_dry=is_dry)
    for name in names:
        results.begin(name)
        attempt(results, {"stage": "build", "case": name}, known[name](), CPU)


def run_kernels(connection: Connection, is_dry: bool, stage: str, names: Sequence[str]) -> None:
    """The stage `check` or `time` of the named cases, one after the other."""
    if is_dry:
        interpret()
    device, results = device_of(is_dry), Results(connection)
    cases = {case.name: case.problem for case in kernel_cases(is_dry=is_dry)}
    rate: float | None = None
    for name in names:
        results.begin(name)
        problem = cases[name]
        if problem.needs_cuda and is_dry:
            results.line(head(stage, problem) | {"ok": None, "error": "not run: it needs CUDA"})
        elif stage == "check":
            attempt(results, head(stage, problem), _checked(problem, device), device)
        else:
            rate = rate or copy_rate(device, DRY_COPY_BYTES if is_dry else None)
            attempt(results, head(stage, problem), timed(problem, device, rate), device)


def interpret() -> None:
    """From now on this process's kernels run in Triton's interpreter, once each."""
    os.environ["TRITON_INTERPRET"] = "1"
    dispatch._cpu_backend = lambda: dispatch.KernelBackend.TRITON  # type: ignore[assignment]
    clock.CPU_SECONDS = 0.0
    torch.set_num_threads(1)


def device_of(is_dry: bool) -> torch.device:
    """The GPU, or the CPU in its place."""
    return torch.device("cpu" if is_dry else "cuda")


def head(stage: str, problem: Problem) -> Line:
    """What names a line."""
    return {
        "stage": stage,
        "op": problem.op,
        "variant": problem.variant,
        "shape": dict(problem.shape),
        "dtype": problem.dtype,
        "case": problem.name,
        "bytes": problem.bytes,
        "flops": problem.flops,
    }


def _checked(problem: Problem, device: torch.device) -> Iterator[Line]:
    seed = int.from_bytes(os.urandom(4), "little")
    yield head("check", problem) | asdict(check(problem, device, seed))


def timed(problem: Problem, device: torch.device, rate: float) -> Iterator[Line]:
    """One line, with the share of `rate`, bytes read and written per second."""
    count = sets_of(problem.bytes) if device.type == "cuda" else 2
    tensors = RandomTensors(device)
    times = time_calls([problem.make(tensors).run for _ in range(count)], device)
    gbs = problem.bytes / times.p50 / 1e3
    yield head("time", problem) | {
        "ok": True,
        "us_p10": times.p10,
        "us_p50": times.p50,
        "us_p90": times.p90,
        "gbs": gbs,
        "pct_copy": 100 * gbs * 1e9 / rate,
    }
