"""Every variant of every Triton kernel, compiled for sm_90 without a GPU, with what its machine code must be like.

Variants are calls of the operations as the engine makes them; which kernels they launch, and how, is found by recording.
`python -m tests.engine.kernels.compile_rung` prints one JSON line per variant and kernel; `launch_recorder.py` says how.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from tests.benchmarks.kernels.attention import decode_problem, prefill_problem
from tests.benchmarks.kernels.elementwise import (
    bitmask_problem,
    cutoff_problem,
    norm_problem,
    rotary_problem,
    silu_problem,
)
from tests.benchmarks.kernels.gemm import gemm_problem, round_rows_problem
from tests.benchmarks.kernels.lora import embedding_problem, layer_problem, pair_problem
from tests.benchmarks.kernels.lora_folded import READERS, folded_problem
from tests.benchmarks.kernels.problem import Problem
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, LayerShape
from tests.engine.kernels.launch_recorder import LaunchRecorder, UnfilledTensors
from tests.engine.kernels.sass import MachineCode, machine_codes

MAX_SHARED_BYTES = 227 << 10
"""What one block may have on sm_90."""

Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a kernel's code must be like where its rows are 16 bits wide and its widths multiples of 16.

    `values` are the stored ones that one turn of its main loop takes, `most` the instructions a value may cost. An H200
    issues 15.6 for a bf16 value, 7.8 for one of 8 bits, 4.1 for one of 4 while its memory delivers one. `at_once`: all
    loads are on their way before any is waited for.
    """

    matrix: str | None = None
    load_bits: int = 32
    values: Callable[[Constants], int] | None = None
    most: float = 0.0
    at_once: bool = False


def _weights(c: Constants) -> int:
    return int(c["block_n"] * c["span"] * c["spans"])


def _demand(kernel: str, constants: Constants) -> Demand:
    """Raises `KeyError` for a kernel without a demand: a new one must state its own."""
    if kernel == "skinny_kernel":
        # Groups of fewer inputs, and zeros, cost more; the fewer outputs of a small tile share less.
        plain = (
            constants["block_n"] >= 64 and constants["groups_per_span"] <= 1 and not constants["has_zeros"]
        )
        most = {8: 4.4, 4: 3.4}[constants["bits"]] if plain else {8: 9.0, 4: 8.0}[constants["bits"]]
        return Demand("HMMA", 128, _weights, most)
    return {
        "wide_kernel": Demand("HGMMA", 128),
        "decode_kernel": Demand("HMMA", 128, lambda c: int(2 * c["block_n"] * c["size"]), 8.0),
        "merge_kernel": Demand(),
        "prefill_kernel": Demand("HMMA", 128),
        "shrink_tile_kernel": Demand("HMMA", 128),
        "shrink_row_kernel": Demand(None, 128, lambda c: int(c["split_k"] * c["block_r"]), 7.0, True),
        "expand_tile_kernel": Demand("HMMA", 128),
        "expand_row_kernel": Demand(None, 128, lambda c: int(c["block_n"] * c["block_r"]), 6.0, True),
        "expand_silu_mul_kernel": Demand("HMMA", 128),
        "expand_rotary_kernel": Demand("HMMA", 128),
        "expand_rms_norm_kernel": Demand(None, 128),
        "embedding_kernel": Demand(),
        "order_kernel": Demand(),
        "chunk_kernel": Demand(),
        "cutoff_kernel": Demand(),
        "bitmask_kernel": Demand(),
        "rms_norm_kernel": Demand(None, 128),
        "rotary_kernel": Demand(None, 64),
        "silu_mul_kernel": Demand(None, 128),
        "round_rows_kernel": Demand(None, 128),
    }[kernel]


@dataclass(frozen=True, slots=True)
class Variant:
    """One call. `aligned` False: rows of odd length, whose loads cannot be wide."""

    problem: Problem
    aligned: bool = True


def variants() -> list[Variant]:
    """In an order that spreads the slow ones."""
    return [*_gemms(), *_attentions(), *_loras(), *_elementwise()]


def _gemms() -> Iterator[Variant]:
    for bits in ("int8", "int4"):
        for rows in (1, 16, 32, 64, 256):
            yield Variant(gemm_problem(bits, rows, 4096, 4096, "bfloat16"))
        yield Variant(gemm_problem(bits, 16, 28672, 4096, "bfloat16"))
        yield Variant(gemm_problem(bits, 4, 4096, 4096, "float32"))
    for rows in (16, 256):
        yield Variant(gemm_problem("int4 zeros", rows, 4096, 4096, "bfloat16"))
        yield Variant(gemm_problem("int4", rows, 4096, 4096, "bfloat16", group=32))
    yield Variant(gemm_problem("int4 zeros", 16, 4096, 4096, "bfloat16", group=64))
    yield Variant(gemm_problem("int4", 16, 4096, 4096, "float16"))


def _heads(size: int, group: int) -> LayerShape:
    return replace(LLAMA_3_8B, heads=8 * group, head_dim=size)


def _attentions() -> Iterator[Variant]:
    for size, group in ((64, 3), (128, 4), (256, 2), (512, 8)):
        window = 4096 if size == 64 else None
        yield Variant(decode_problem(_heads(size, group), 64, 8192, "bfloat16", "bfloat16", window))
        yield Variant(prefill_problem(_heads(size, group), 512, 8192, "bfloat16", "bfloat16", window))
    yield Variant(decode_problem(_heads(128, 4), 1, 300, "bfloat16", "bfloat16"))
    yield Variant(decode_problem(_heads(128, 4), 64, 8192, "bfloat16", "fp8"))
    yield Variant(prefill_problem(_heads(128, 4), 512, 8192, "bfloat16", "fp8"))
    yield Variant(decode_problem(_heads(128, 4), 64, 8192, "float32", "float32"))
    yield Variant(prefill_problem(_heads(128, 4), 512, 8192, "float16", "float16"))


def _loras() -> Iterator[Variant]:
    yield Variant(pair_problem(64, 64, 16, 4096, 4096, "bfloat16", "bfloat16"))
    yield Variant(pair_problem(3, 2, 5, 1001, 999, "bfloat16", "bfloat16"), aligned=False)
    yield Variant(pair_problem(64, 64, 16, 4096, 4096, "float32", "float32"))
    for pages in ("bfloat16", "int8", "fp8"):
        for rows, adapters in ((64, 64), (16, 1), (512, 2)):
            yield Variant(layer_problem(LLAMA_3_8B, rows, adapters, 16, "bfloat16", pages))
    yield Variant(pair_problem(9, 9, 5, 1001, 999, "bfloat16", "int8"), aligned=False)
    for reader in READERS:
        yield Variant(folded_problem(reader, LLAMA_3_8B, 16, 1, 16, "bfloat16", "bfloat16"))
    yield Variant(folded_problem("silu", LLAMA_3_8B, 16, 1, 16, "bfloat16", "int8"))
    yield Variant(embedding_problem(LLAMA_3_8B, 64, 64, 16, "bfloat16", "bfloat16"))
    yield Variant(embedding_problem(LLAMA_3_8B, 64, 64, 16, "bfloat16", "int8"))
    yield Variant(cutoff_problem(LLAMA_3_8B, 64))


def _elementwise() -> Iterator[Variant]:
    for dtype in ("bfloat16", "float16", "float32"):
        yield Variant(bitmask_problem(LLAMA_3_8B, 64, dtype))
    for dtype in ("bfloat16", "float32"):
        yield Variant(norm_problem(LLAMA_3_8B, 64, dtype))
        yield Variant(rotary_problem(LLAMA_3_8B, 64, dtype, dtype, qk_norm=dtype == "bfloat16"))
        yield Variant(silu_problem(LLAMA_3_8B, 64, dtype))
    yield Variant(rotary_problem(LLAMA_3_8B, 64, "bfloat16", "fp8", qk_norm=False))
    yield Variant(round_rows_problem(64, 4096, "bfloat16"))


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a launch of a variant compiled; `shared` in bytes."""

    kernel: str
    constants: Constants
    num_warps: int
    shared: int
    seconds: float
    cubin: bytes


def result_line(variant: Variant, compiled: Compiled, code: MachineCode) -> dict[str, Any]:
    """The line of one kernel of a variant; `failures` names what is not as demanded."""
    demand = _demand(compiled.kernel, compiled.constants)
    per_value = 0.0
    if demand.values is not None:
        per_value = code.loop * 32 * compiled.num_warps / demand.values(compiled.constants)
    line = {
        "variant": variant.problem.name,
        "kernel": compiled.kernel,
        "shared": compiled.shared,
        "seconds": round(compiled.seconds, 3),
        "instructions_per_value": round(per_value, 2),
        **code.document(),
    }
    return line | {"failures": list(_failures(variant, demand, code, line))}


def _failures(variant: Variant, demand: Demand, code: MachineCode, line: dict[str, Any]) -> Iterator[str]:
    if code.stack or code.local:
        yield f"{code.stack} bytes of stack, {code.local} loads and stores of spilled registers"
    if line["shared"] > MAX_SHARED_BYTES:
        yield f"{line['shared']} bytes of shared memory"
    if variant.aligned and code.load_bits < demand.load_bits:
        yield f"loads of {code.load_bits} bits instead of {demand.load_bits}"
    if demand.at_once and variant.aligned and code.late_loads:
        yield f"{code.late_loads} loads wait for others"
    if variant.problem.dtype == "float32":
        return
    if code.matrix != demand.matrix:
        yield f"{code.matrix} instead of {demand.matrix}"
    if (
        demand.values is not None
        and variant.aligned
        and not 1 <= line["instructions_per_value"] <= demand.most
    ):
        yield f"{line['instructions_per_value']} instructions per value instead of at most {demand.most}"


class _Compiler:
    """In each process: the recorder lives as long as the process."""

    def __init__(self) -> None:
        self._recorder = LaunchRecorder()
        self._variants = variants()

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


def main() -> None:
    """Print the lines of all variants; the argument is the number of processes."""
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
    all_variants = variants()
    if processes == 1:
        found = [_compiled(index) for index in range(len(all_variants))]
    else:
        with get_context("spawn").Pool(processes) as pool:
            found = list(pool.imap(_compiled, range(len(all_variants))))
    cubins = list({compiled.cubin for each in found for compiled in each})
    codes = dict(zip(cubins, machine_codes(cubins), strict=True))
    lines = (
        json.dumps(result_line(variant, compiled, codes[compiled.cubin]))
        for variant, each in zip(all_variants, found, strict=True)
        for compiled in each
    )
    for line in dict.fromkeys(lines):
        print(line)


if __name__ == "__main__":
    main()
