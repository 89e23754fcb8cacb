"""A measurement in a process of its own, with the environment engines run in: threads bound to cores, huge pages."""

import subprocess
import sys

import msgspec

from loraplex.platform.bench.errors import BenchFailed
from loraplex.platform.bench.report import Report
from loraplex.platform.config import engine_environment


def run_child(module: str, job: msgspec.Struct) -> Report:
    """The module gets `job` on standard input and writes its report as its last line.

    Raises `BenchFailed` with the last line the child said.
    """
    child = subprocess.run(
        [sys.executable, "-m", module],
        input=msgspec.json.encode(job),
        capture_output=True,
        env=engine_environment(),
        check=False,
    )
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").strip().splitlines()
        raise BenchFailed(said[-1] if said else f"the measuring process ended with {child.returncode}")
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=Report)
