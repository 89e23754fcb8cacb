"""The masks of `bench grammar` in a process of its own."""

import sys

import msgspec
from tests.benchmarks.grammar_masks import MaskShape, measure_masks

from loraplex.platform.bench.lora import run_child
from loraplex.platform.bench.report import Report

MODULE = "tests.benchmarks.grammar_process"


class MaskJob(msgspec.Struct, frozen=True):
    """What the child is to measure."""

    model: str
    shape: MaskShape


def measure_masks_as_engine(job: MaskJob) -> Report:
    """Run the job in a child. Raises `BenchFailed`."""
    return run_child(MODULE, job)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=MaskJob)
    sys.stdout.buffer.write(msgspec.json.encode(measure_masks(job.model, job.shape)) + b"\n")


if __name__ == "__main__":
    main()
