"""Times single kernels in a process with the environment of engines, also as shares of the memcpy bandwidth of the same run."""

import sys
from collections.abc import Iterator

import msgspec
import torch
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.kernels.attention import decode_problem, prefill_problem
from tests.benchmarks.kernels.clock import copy_rate, product_rate, sets_of, time_calls
from tests.benchmarks.kernels.gemm import gemm_problem
from tests.benchmarks.kernels.lora import layer_problem, pair_problem
from tests.benchmarks.kernels.problem import Problem, RandomTensors
from tests.benchmarks.kernels.shapes import LAYER_SHAPES, LayerShape

from loraplex.engine.device import choose_device
from loraplex.platform.bench.lora import run_in_subprocess
from loraplex.platform.bench.report import Case, Report

MODULE = "tests.benchmarks.process"
COLUMNS = ("us_p50", "us_p90", "gbs", "pct_copy", "gflops")
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}


class AttentionShape(msgspec.Struct, frozen=True):
    """Each number of rows at each context, and a prefill chunk of `chunk` tokens at the end of each context; 0: none."""

    kv_dtype: str
    rows: list[int]
    context: list[int]
    chunk: int


class GemmShape(msgspec.Struct, frozen=True):
    """Every variant at every number of rows of x."""

    variants: list[str]
    rows: list[int]


class LoraSizes(msgspec.Struct, frozen=True):
    """(rows, adapters), and the rank of all."""

    pairs: list[tuple[int, int]]
    rank: int


class KernelJob(msgspec.Struct, frozen=True):
    """`benchmark` names which of the last three fields is set."""

    benchmark: str
    device: str
    dtype: str
    shape: str
    attention: AttentionShape | None = None
    gemm: GemmShape | None = None
    lora: LoraSizes | None = None


def measure_in_subprocess(job: KernelJob) -> Report:
    """Run the job in a child process. Raises `BenchFailed`."""
    return run_in_subprocess(MODULE, job, CHECKOUT)


def measure_kernels(job: KernelJob) -> Report:
    """Measure each problem of the job. Raises `ModelError` for a device this machine lacks."""
    device = choose_device(job.device)
    model = LAYER_SHAPES[job.shape]
    report = Report(f"{job.benchmark}-kernels", COLUMNS)
    rate = copy_rate(device)
    products = product_rate(device, PRODUCT_SIDE[device.type])
    ceiling = {"gbs": rate / 1e9, "gflops": products / 1e9}
    report.cases.append(Case("ceilings of this run", {"threads": torch.get_num_threads()}, ceiling))
    for problem in problems_of(job, model):
        if problem.needs_cuda and device.type != "cuda":
            report.notes.append(f"{problem.name}: needs CUDA")
        else:
            report.cases.append(_measured(problem, device, rate))
    report.notes.append("gbs counts the least bytes a call must move; the copy's are read and written.")
    return report


def problems_of(job: KernelJob, model: LayerShape) -> Iterator[Problem]:
    """The problems of the job, at the widths of the model."""
    if job.attention is not None:
        yield from _attentions(job.attention, model, job.dtype)
    if job.gemm is not None:
        for rows in job.gemm.rows:
            for outputs, inputs in model.products().values():
                for variant in job.gemm.variants:
                    yield gemm_problem(variant, rows, outputs, inputs, job.dtype)
    if job.lora is not None:
        for rows, adapters in job.lora.pairs:
            width, rank = model.hidden, job.lora.rank
            yield pair_problem(rows, adapters, rank, width, width, job.dtype, job.dtype)
            yield layer_problem(model, rows, adapters, rank, job.dtype, job.dtype)


def _attentions(sizes: AttentionShape, model: LayerShape, dtype: str) -> Iterator[Problem]:
    for context in sizes.context:
        for rows in sizes.rows:
            yield decode_problem(model, rows, context, dtype, sizes.kv_dtype)
        if sizes.chunk:
            yield prefill_problem(model, min(sizes.chunk, context), context, dtype, sizes.kv_dtype)


def _measured(problem: Problem, device: torch.device, rate: float) -> Case:
    tensors = RandomTensors(device)
    sets = sets_of(problem.bytes)
    times = time_calls([problem.make(tensors).run for _ in range(sets)], device)
    gbs = problem.bytes / times.p50 / 1e3
    figure = {
        "us_p10": times.p10,
        "us_p50": times.p50,
        "us_p90": times.p90,
        "bytes": problem.bytes,
        "flops": problem.flops,
        "gbs": gbs,
        "pct_copy": 100e9 * gbs / rate,
        "gflops": problem.flops / times.p50 / 1e3,
    }
    return Case(problem.name, dict(problem.shape) | {"dtype": problem.dtype, "sets": sets}, figure)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=KernelJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_kernels(job)) + b"\n")


if __name__ == "__main__":
    main()
