"""The stage `build`: what is launched on a GPU compiled for sm_90, its resources read from the machine code.

On the machine with the GPU this fills Triton's cache, so that no timed process compiles: the target, the options and the source
that an entry is found by are those of a launch there. `compilations.py` counts what was missing.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.benchmarks.gpu.launchers import compile_launcher
from tests.benchmarks.kernels.problem import Problem
from tests.engine.kernels.compile_demands import demand_of
from tests.engine.kernels.compile_rung import memory_failures
from tests.engine.kernels.launch_recorder import LaunchRecorder, Recorded, UnfilledTensors
from tests.engine.kernels.sass import machine_code


@cache
def recorder() -> LaunchRecorder:
    """The one of this process."""
    return LaunchRecorder()


def build(problem: Problem) -> Iterator[dict[str, Any]]:
    """One line per kernel of ours."""
    kernels = recorder()
    problem.make(UnfilledTensors()).run()
    head = {"op": problem.op, "shape": dict(problem.shape), "dtype": problem.dtype, "case": problem.name}
    for launch in kernels.take():
        yield built(launch, problem.dtype) | head


def built(launch: Recorded, dtype: str) -> dict[str, Any]:
    """What a line says of a kernel: its resources, and what of them is not as demanded."""
    compile_launcher(launch.binary)
    code, shared = machine_code(launch.binary.asm["cubin"]), int(launch.binary.metadata.shared)
    demand = demand_of(launch.kernel, launch.constants, dtype)
    failures = [*memory_failures(demand, code.document() | {"shared": shared})]
    return {
        "stage": "build",
        "variant": launch.kernel,
        "ok": not failures,
        "regs": code.registers,
        "stack": code.stack,
        "shared": shared,
        "compile_s": round(launch.seconds, 3),
        "error": "; ".join(failures) or None,
    }
