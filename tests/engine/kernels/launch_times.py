"""Host time of a launch by Triton's binder and by a plan, without a GPU: kernels compile for sm_90, and the driver is left out.

`python -m tests.engine.kernels.launch_times` prints a row per operation.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from tests.benchmarks.kernels.attention import decode_problem
from tests.benchmarks.kernels.elementwise import norm_problem, rotary_problem, silu_problem
from tests.benchmarks.kernels.gemm import gemm_problem
from tests.benchmarks.kernels.lora import pair_problem
from tests.benchmarks.kernels.problem import Problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B
from tests.engine.kernels.launch_recorder import DeviceTensor, HopperDriver, UnfilledTensors
from triton.compiler import CompiledKernel

from loraplex.engine.kernels import dispatch
from loraplex.engine.kernels.triton import launch_plans, quantized_linear, quantized_linear_tiles

ROUNDS = 40
LAUNCHES = 25

Launched = list[tuple[Any, tuple[Any, ...]]]


def problems() -> dict[str, Problem]:
    """The operations of a decode step."""
    return {
        "int4 product": gemm_problem("int4", 16, 6144, 4096, "bfloat16"),
        "int4 product, zeros": gemm_problem("int4 zeros", 16, 6144, 4096, "bfloat16"),
        "RMS norm": norm_problem(LLAMA_3_8B, 16, "bfloat16"),
        "rotary and KV write": rotary_problem(LLAMA_3_8B, 16, "bfloat16", "bfloat16", qk_norm=False),
        "SiLU and product": silu_problem(LLAMA_3_8B, 16, "bfloat16"),
        "decode attention": decode_problem(LLAMA_3_8B, 16, 512, "bfloat16", "bfloat16"),
        "LoRA pair": pair_problem(64, 64, 16, 4096, 4096, "bfloat16", "bfloat16"),
    }


def without_gpu() -> Launched:
    """Replace the driver for good; return the list to which each launch adds its compiled kernel and arguments."""
    launched: Launched = []

    def run(kernel: Any, *arguments: Any) -> None:
        launched.append((kernel, arguments[9:]))

    dispatch._cpu_backend = lambda: dispatch.KernelBackend.TRITON  # type: ignore[assignment]
    triton.runtime.driver.set_active(HopperDriver())
    # What a tensor's subclass adds to each access is not the launch's.
    setattr(DeviceTensor, "__torch_function__", torch._C._disabled_torch_function_impl)  # noqa: B010
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.function = 0
    CompiledKernel.run = property(lambda kernel: lambda *arguments: run(kernel, *arguments))
    return launched


def forget() -> None:
    """Make the next launch of each kind go through the binder."""
    launch_plans._plans.clear()
    quantized_linear._division.cache_clear()
    quantized_linear_tiles._splits_for.cache_clear()


def microseconds(work: Callable[[], object], launched: Launched, *, by_plan: bool) -> float:
    """Return the least mean CPU time of a call over all rounds."""

    def once() -> None:
        if not by_plan:
            forget()
        work()

    best = float("inf")
    for _ in range(ROUNDS):
        launched.clear()
        began = time.process_time()
        for _ in range(LAUNCHES):
            once()
        best = min(best, (time.process_time() - began) / LAUNCHES)
    return best * 1e6


def main() -> None:
    """Print the table."""
    launched = without_gpu()
    print(f"Triton {triton.__version__}, us of host per call")
    print(f"{'operation':24} {'launches':>8} {'binder':>8} {'plan':>8}")
    for name, problem in problems().items():
        run = problem.make(UnfilledTensors()).run
        launched.clear()
        run()
        launches = len(launched)
        binder = microseconds(run, launched, by_plan=False)
        plan = microseconds(run, launched, by_plan=True)
        print(f"{name:24} {launches:8} {binder:8.1f} {plan:8.1f}")


if __name__ == "__main__":
    main()
