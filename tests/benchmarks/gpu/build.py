"""The stage `build`: each kernel of a case compiled for sm_90, its resources read from the machine code.

On the machine with the GPU this fills Triton's cache, so that no timed process compiles.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.benchmarks.kernels.problem import Problem
from tests.engine.kernels.compile_demands import demand_of
from tests.engine.kernels.compile_rung import memory_failures
from tests.engine.kernels.launch_recorder import LaunchRecorder, UnfilledTensors
from tests.engine.kernels.sass import machine_code


@cache
def _recorder() -> LaunchRecorder:
    return LaunchRecorder()


def build(problem: Problem) -> Iterator[dict[str, Any]]:
    """One line per kernel of ours."""
    recorder = _recorder()
    problem.make(UnfilledTensors()).run()
    for launch in recorder.take():
        code, shared = machine_code(launch.binary.asm["cubin"]), int(launch.binary.metadata.shared)
        demand = demand_of(launch.kernel, launch.constants, problem.dtype)
        failures = [*memory_failures(demand, code.document() | {"shared": shared})]
        yield {
            "stage": "build",
            "op": problem.op,
            "variant": launch.kernel,
            "shape": dict(problem.shape),
            "dtype": problem.dtype,
            "case": problem.name,
            "ok": not failures,
            "regs": code.registers,
            "stack": code.stack,
            "shared": shared,
            "compile_s": round(launch.seconds, 3),
            "error": "; ".join(failures) or None,
        }
