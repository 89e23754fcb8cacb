"""`bench lora` in a process of its own."""

import sys

import msgspec

from loraplex.platform.bench.engine_child import run_child
from loraplex.platform.bench.lora import LoraShape, measure_lora
from loraplex.platform.bench.report import Report

MODULE = "loraplex.platform.bench.lora_process"


class LoraJob(msgspec.Struct, frozen=True):
    """What the child is to measure."""

    model: str
    dtype: str
    device: str
    shapes: list[LoraShape]


def measure_as_engine(job: LoraJob) -> Report:
    """Run the job in a child. Raises `BenchFailed`."""
    return run_child(MODULE, job)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoraJob)
    report = measure_lora(job.model, job.dtype, job.device, job.shapes)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
