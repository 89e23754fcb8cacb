"""What runs in a process of its own per operation: an illegal access kills its CUDA context, and nothing else.

Invariant: before anything is tried its name is sent, so that the parent knows what killed the process.
"""

import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.check import check
from tests.benchmarks.gpu.probe import probe
from tests.benchmarks.kernels import clock
from tests.benchmarks.kernels.clock import sets_of, time_calls
from tests.benchmarks.kernels.problem import Problem, RandomTensors

from loraplex.engine.kernels import dispatch
from loraplex.platform.bench.lora import memcpy_bandwidth

DRY_COPY_BYTES = 1 << 20
Line = dict[str, Any]


class Results:
    """The parent's end of the pipe, seen from here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self, name: str) -> None:
        self._connection.send(("begin", name))

    def line(self, line: Line) -> None:
        self._connection.send(("line", line))


def run_probe(connection: Connection, is_dry: bool) -> None:
    """The stage `probe`."""
    results = Results(connection)
    results.begin("probe")
    for line in probe(device_of(is_dry), is_dry=is_dry):
        results.line(line)


def run_build(connection: Connection, is_dry: bool, first: int, processes: int) -> None:
    """The stage `build`: every `processes`-th case from `first` on, compiled as on an H200 but never launched."""
    from tests.benchmarks.gpu.build import build

    results = Results(connection)
    for case in kernel_cases(is_dry=is_dry)[first::processes]:
        results.begin(case.name)
        for line in _caught("build", case.problem, build(case.problem)):
            results.line(line)


def run_kernels(connection: Connection, is_dry: bool, names: Sequence[str], stages: Sequence[str]) -> None:
    """The stages `check` and `time` of the named cases, one after the other."""
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"
        dispatch._cpu_backend = lambda: dispatch.KernelBackend.TRITON  # type: ignore[assignment]
        clock.CPU_SECONDS = 0.0
        torch.set_num_threads(1)
    device, results = device_of(is_dry), Results(connection)
    cases = {case.name: case.problem for case in kernel_cases(is_dry=is_dry)}
    rate = 2 * memcpy_bandwidth(device, DRY_COPY_BYTES if is_dry else None)
    for name in names:
        results.begin(name)
        problem = cases[name]
        if problem.needs_cuda and is_dry:
            results.line(head("check", problem) | {"error": "needs CUDA"})
            continue
        for stage in stages:
            work = _checked(problem, device) if stage == "check" else _timed(problem, device, rate)
            for line in _caught(stage, problem, work):
                results.line(line)


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


def _timed(problem: Problem, device: torch.device, rate: float) -> Iterator[Line]:
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


def _caught(stage: str, problem: Problem, work: Iterator[Line]) -> Iterator[Line]:
    """The lines, or one that says what went wrong: the next case shall run all the same."""
    try:
        yield from work
    except Exception as error:  # noqa: BLE001 - written down as this case's result
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {os.path.basename(last.filename)}:{last.lineno}: {error}"
        yield head(stage, problem) | {"ok": False, "error": text[:600]}
