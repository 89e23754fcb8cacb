"""`bench lora` in a process of its own, with the environment engines run in: threads bound to cores, huge pages."""

import subprocess
import sys

import msgspec

from loraplex.platform.bench.errors import BenchFailed
from loraplex.platform.bench.lora_step import LoraShape, measure_lora
from loraplex.platform.bench.report import Report
from loraplex.platform.config import engine_environment

MODULE = "loraplex.platform.bench.lora_process"


class LoraJob(msgspec.Struct, frozen=True):
    """What the child is to measure."""

    model: str
    dtype: str
    device: str
    shapes: list[LoraShape]


def measure_as_engine(job: LoraJob) -> Report:
    """Run the job in a child. Raises `BenchFailed` with the last line the child said."""
    child = subprocess.run(
        [sys.executable, "-m", MODULE],
        input=msgspec.json.encode(job),
        capture_output=True,
        env=engine_environment(),
        check=False,
    )
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        raise BenchFailed(said[-1] if said else f"the measuring process ended with {child.returncode}")
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=Report)


def main() -> None:
    """Read a job from standard input, write its report as one line."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=LoraJob)
    report = measure_lora(job.model, job.dtype, job.device, job.shapes)
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
