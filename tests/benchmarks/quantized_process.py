"""`bench quantization` in a process of its own."""

import sys

import msgspec
from tests.benchmarks.quantization import measure_quantization

from loraplex.platform.bench.lora import run_child
from loraplex.platform.bench.report import Report

MODULE = "tests.benchmarks.quantized_process"


class QuantizationJob(msgspec.Struct, frozen=True):
    """What the child is to measure."""

    model: str
    dtype: str
    device: str
    schemes: list[str]
    rows: list[int]
    steps: int


def measure_as_engine(job: QuantizationJob) -> Report:
    """Run the job in a child. Raises `BenchFailed`."""
    return run_child(MODULE, job)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=QuantizationJob)
    report = measure_quantization(job.model, job.dtype, job.device, job.schemes, job.rows, job.steps)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
