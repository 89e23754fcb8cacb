"""Every variant of every Triton kernel, compiled for sm_90 without a GPU, with what its machine code must be like.

`python -m tests.engine.kernels.compile_rung` prints a table; `--triton FOLDER` compiles with the Triton in that folder,
`--json` prints a line per variant and kernel. `launch_recorder.py` says how launches become variants.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from tests.engine.kernels.compile_demands import Constants, Demand, demand_of
from tests.engine.kernels.compile_variants import Variant, variants
from tests.engine.kernels.launch_recorder import LaunchRecorder, UnfilledTensors
from tests.engine.kernels.sass import MachineCode, machine_codes

ROW = "{:24.24} {:72.72} {:>9} {:>6} {:>7} {:>8} {:>9} {:>5}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a launch of a variant compiled; `shared` in bytes."""

    kernel: str
    constants: Constants
    num_warps: int
    shared: int
    seconds: float
    cubin: bytes


def programs_of_sm(compiled: Compiled, registers: int) -> int:
    """Programs that an SM of sm_90 holds at once, by its 64 warps, 65,536 registers and 228 KB of shared memory."""
    by_registers = 65536 // (32 * compiled.num_warps * -(-registers // 8) * 8)
    by_shared = (228 << 10) // (compiled.shared + 1024)
    return min(64 // compiled.num_warps, by_registers, by_shared)


def result_line(variant: Variant, compiled: Compiled, code: MachineCode) -> dict[str, Any]:
    """The line of one kernel of a variant; `failures` names what is not as demanded."""
    demand = demand_of(compiled.kernel, compiled.constants, variant.problem.dtype)
    per_value = 0.0
    if demand.values is not None:
        per_value = code.loop * 32 * compiled.num_warps / demand.values(compiled.constants)
    line = {
        "variant": variant.problem.name,
        "kernel": compiled.kernel,
        "cubin": sha256(compiled.cubin).hexdigest()[:16],
        "shared": compiled.shared,
        "programs": programs_of_sm(compiled, code.registers),
        "seconds": round(compiled.seconds, 3),
        "instructions_per_value": round(per_value, 2),
        "most": demand.most,
        **code.document(),
    }
    failures = [*memory_failures(demand, line)]
    if variant.aligned:
        failures += _aligned_failures(demand, line)
    if variant.problem.dtype != "float32" and code.matrix != demand.matrix:
        failures.append(f"{code.matrix} instead of {demand.matrix}")
    if variant.problem.dtype != "float32" and variant.aligned:
        failures += _length_failures(demand, line)
    return line | {"failures": failures}


def memory_failures(demand: Demand, line: Mapping[str, Any]) -> Iterator[str]:
    """Name what of registers and shared memory is not as demanded; `line` as of `result_line`."""
    known = demand.spills
    if line["stack"] > known.stack or line["local"] > known.accesses or line["loop_local"]:
        yield (
            f"{line['stack']} bytes of stack instead of at most {known.stack}, {line['local']} loads and stores of spilled "
            f"registers instead of at most {known.accesses}, {line['loop_local']} of them in the main loop"
        )
    if line["shared"] > demand.most_shared:
        yield f"{line['shared']} bytes of shared memory instead of at most {demand.most_shared}"


def _aligned_failures(demand: Demand, line: dict[str, Any]) -> Iterator[str]:
    if line["load_bits"] < demand.load_bits:
        yield f"loads of {line['load_bits']} bits instead of {demand.load_bits}"
    if demand.at_once and line["late_loads"]:
        yield f"{line['late_loads']} loads wait for others"


def _length_failures(demand: Demand, line: dict[str, Any]) -> Iterator[str]:
    per_value = line["instructions_per_value"]
    if demand.values is not None and not 1 <= per_value <= demand.most:
        yield f"{per_value} instructions per value instead of at most {demand.most}"
    if line["programs"] < demand.programs:
        yield f"{line['programs']} programs fit an SM instead of {demand.programs}"


class _Compiler:
    """In each process: the recorder lives as long as the process."""

    def __init__(self) -> None:
        self._recorder = LaunchRecorder()
        self._variants = variants(with_rare=True)

    def compiled(self, index: int) -> list[Compiled]:
        self._variants[index].problem.make(UnfilledTensors()).run()
        return [
            Compiled(
                launch.kernel,
                launch.constants,
                launch.num_warps,
                int(launch.binary.metadata.shared),
                launch.seconds,
                launch.binary.asm["cubin"],
            )
            for launch in self._recorder.take()
        ]


_compilers: list[_Compiler] = []


def _compiled(index: int) -> list[Compiled]:
    if not _compilers:
        _compilers.append(_Compiler())
    return _compilers[0].compiled(index)


def compiled_lines(processes: int, only: str = "", *, with_rare: bool = False) -> list[dict[str, Any]]:
    """Return one line per kernel and variant whose name contains `only`."""
    chosen = {
        i: variant
        for i, variant in enumerate(variants(with_rare=True))
        if only in variant.problem.name and (with_rare or not variant.is_rare)
    }
    if processes == 1:
        found = [_compiled(index) for index in chosen]
    else:
        with get_context("spawn").Pool(processes) as pool:
            found = list(pool.imap(_compiled, chosen))
    cubins = list({compiled.cubin for each in found for compiled in each})
    codes = dict(zip(cubins, machine_codes(cubins), strict=True))
    return [
        result_line(variant, compiled, codes[compiled.cubin])
        for variant, each in zip(chosen.values(), found, strict=True)
        for compiled in each
    ]


def table_of(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per kernel and machine code, under the first variant that launches it."""
    distinct = {(line["kernel"], line["cubin"]): line for line in reversed(lines)}
    rows = sorted(distinct.values(), key=lambda line: (line["kernel"], line["variant"]))
    titles = ("kernel", "variant", "registers", "spills", "shared", "programs", "per value", "most")
    yield ROW.format(*titles)
    for line in rows:
        spills = line["stack"] + line["local"]
        per_value = line["instructions_per_value"] or "-"
        yield ROW.format(
            line["kernel"],
            line["variant"],
            line["registers"],
            spills,
            line["shared"],
            line["programs"],
            per_value,
            line["most"] or "-",
        )
    wrong = [line for line in lines if line["failures"]]
    for line in wrong:
        yield f"{line['kernel']}, {line['variant']}: {'; '.join(line['failures'])}"
    yield f"Triton {triton.__version__}: {len(rows)} kernels of {len(lines)} launches, {len(wrong)} not as demanded"


def main() -> None:
    """Print the table, and exit with 1 if a variant is not as demanded; or the lines."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.kernels.compile_rung", description=__doc__)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--triton", type=Path, help="folder of another Triton: pip install --no-deps --target"
    )
    parser.add_argument("--every", action="store_true", help="what is too much for each change, too")
    parser.add_argument("--only", default="", help="what a variant's name contains, such as gemm/int4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.triton is not None and arguments.triton.resolve() not in Path(triton.__file__).parents:
        _start_with(arguments.triton.resolve())
    # A cache that other runs filled would count their compile times.
    with TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        lines = compiled_lines(arguments.processes, arguments.only, with_rare=arguments.every)
    for row in map(json.dumps, lines) if arguments.json else table_of(lines):
        print(row)
    sys.exit(not arguments.json and any(line["failures"] for line in lines))


def _start_with(folder: Path) -> None:
    """Start again with this folder before all others: an imported Triton cannot be exchanged."""
    if not (folder / "triton").is_dir():
        sys.exit(f"{folder} holds no Triton")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.engine.kernels.compile_rung", *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    main()
