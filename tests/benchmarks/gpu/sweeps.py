"""The stage `sweep`: launch constants tried at other values, each in a process of its own, since launches may be remembered.

Invariant: a constant is changed in the worker alone; what is served is what the module says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection

from tests.benchmarks.gpu.cases import DTYPE, Case
from tests.benchmarks.gpu.faults import attempt
from tests.benchmarks.gpu.worker import DRY_COPY_BYTES, Results, device_of, head, interpret, timed
from tests.benchmarks.kernels.attention import decode_problem, prefill_problem
from tests.benchmarks.kernels.clock import copy_rate
from tests.benchmarks.kernels.lora import pair_problem
from tests.benchmarks.kernels.problem import Problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY

KERNELS = "loraplex.engine.kernels.triton"


@dataclass(frozen=True, slots=True)
class Sweep:
    """One constant of one module, the values tried, and the problems timed with each."""

    module: str
    constant: str
    values: tuple[int, ...]
    problems: tuple[Problem, ...]

    def cases(self, value: int) -> dict[str, Case]:
        """By their names with this value."""
        return {
            f"{problem.name}/{self.constant} {value}": Case("sweep", problem, 1) for problem in self.problems
        }


def sweeps(*, is_dry: bool) -> list[Sweep]:
    """All of them; dry, one value of one."""
    if is_dry:
        problem = decode_problem(TINY, 2, 20, "float16", "float16")
        return [Sweep(f"{KERNELS}.decode_attention", "DECODE_STAGES", (3,), (problem,))]
    model, width = LLAMA_3_8B, LLAMA_3_8B.hidden
    decodes = tuple(decode_problem(model, 64, context, DTYPE, DTYPE) for context in (512, 8192))
    prefills = (prefill_problem(model, 512, 512, DTYPE, DTYPE),)
    pairs = (
        pair_problem(64, 64, 16, width, width, DTYPE, DTYPE),
        pair_problem(64, 1, 16, width, width, DTYPE, DTYPE),
    )
    return [
        Sweep(f"{KERNELS}.decode_attention", "DECODE_STAGES", (3, 5, 7), decodes),
        Sweep(f"{KERNELS}.decode_attention", "NUM_WARPS", (2, 4, 8), decodes),
        Sweep(f"{KERNELS}.prefill_attention", "PREFILL_STAGES", (2, 3, 5), prefills),
        Sweep(f"{KERNELS}.lora_shrink", "ROW_WARPS", (2, 4, 8), pairs),
        Sweep(f"{KERNELS}.lora_expand", "TILE_STAGES", (2, 3, 5), pairs),
    ]


def run_sweep(connection: Connection, is_dry: bool, sweep: int, value: int, names: Sequence[str]) -> None:
    """Time one sweep's problems with one value."""
    results, device, chosen = Results(connection), device_of(is_dry), sweeps(is_dry=is_dry)[sweep]
    if is_dry:
        interpret()
    module = import_module(chosen.module)
    cases = chosen.cases(value)
    rate: float | None = None
    for name in names:
        results.begin(name)
        # Raises for a constant that does not exist: a new attribute would change nothing.
        getattr(module, chosen.constant)
        setattr(module, chosen.constant, value)
        rate = rate or copy_rate(device, DRY_COPY_BYTES if is_dry else None)
        problem = cases[name].problem
        lines = ({**line, "case": name} for line in timed(problem, device, rate))
        attempt(results, head("time", problem) | {"case": name}, lines, device)


def every_value(*, is_dry: bool) -> Iterator[tuple[int, int, dict[str, Case]]]:
    """Index of the sweep, value, and its cases."""
    for index, sweep in enumerate(sweeps(is_dry=is_dry)):
        for value in sweep.values:
            yield index, value, sweep.cases(value)
