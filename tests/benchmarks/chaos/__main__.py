"""The process that runs the matrix, in namespaces of its own: reads a `ChaosJob`, writes its report as its last line."""

import asyncio
import subprocess
import sys
from functools import partial
from typing import Final

import msgspec
from tests.benchmarks.chaos.disks import namespace_command
from tests.benchmarks.chaos.matrix import ChaosJob, measure_chaos
from tests.benchmarks.checkout import CHECKOUT

from loraplex.platform.bench.report import BenchFailed, Report
from loraplex.platform.processes.child_process import module_command
from loraplex.platform.processes.environment import foreign_environment

MODULE: Final = "tests.benchmarks.chaos"


def measure_in_namespace(job: ChaosJob) -> Report:
    """Run the job in a process whose mounts are its own, if that is possible here. Raises `BenchFailed`."""
    prefix = namespace_command()
    wanted = msgspec.structs.replace(job, may_mount=bool(prefix))
    done = subprocess.run(
        (*prefix, *module_command(MODULE)),
        input=msgspec.json.encode(wanted),
        stdout=subprocess.PIPE,
        env=foreign_environment() | {"PYTHONPATH": str(CHECKOUT)},
        check=False,
    )
    if done.returncode != 0 or not done.stdout:
        raise BenchFailed(f"the process of the matrix ended with {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


def main() -> None:
    """Run the job of standard input."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ChaosJob)
    report = asyncio.run(measure_chaos(job, partial(print, file=sys.stderr)))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
