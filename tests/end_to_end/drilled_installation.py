"""One installation with the scripted engine, and drills against it: `python -m tests.end_to_end.drilled_installation`.

Reads a `DrillPlan` as one line of JSON. A gateway that ends is started again, as by a supervisor. After each drill it writes its
exit code and output as one line of JSON. Run in a mount namespace of its own, its data directory is a small tmpfs.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
from tests.end_to_end.live_server import until
from typer.testing import CliRunner

from loraplex.platform.processes.child_process import python_command

RUN = """
from functools import partial
from loraplex.platform.cli.main import main
from loraplex.platform.engines import startup
from loraplex.platform.engines.process import WatchdogConfig
from loraplex.platform.server import components

components.AdmissionConfig = partial(components.AdmissionConfig, lease_s=4.0, heartbeat_s=1.0)
startup.EngineProcessOptions = partial(startup.EngineProcessOptions, watchdog=WatchdogConfig(unresponsive_s=2.0))
main()
"""
"""Leases and the watchdog are quicker than in production, since drills wait for their ends."""
READY_S = 120.0


class DrillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` by their names. `tmpfs_mib`: the size of the data directory, in a private mount namespace; None: as it is."""

    data_dir: str
    port: int
    settings: dict[str, str]
    tmpfs_mib: int | None
    drills: list[list[str]]


class DrillRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one drill, how long it took, and the names in the data directory after it."""

    exit_code: int
    seconds: float
    output: str
    errors: str
    files: list[str]


class Supervisor:
    """Starts the gateway whenever it has ended, until `end`."""

    def __init__(self, plan: DrillPlan) -> None:
        options = ("serve", "--port", str(plan.port), "--data-dir", plan.data_dir)
        self._command = python_command("-c", RUN, *options)
        self._ending = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending = True
        self._process.kill()
        self._thread.join(60)

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def _supervise(self) -> None:
        self._process.wait()
        while not self._ending:
            self._process = self._start()
            self._process.wait()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def drilled(plan: DrillPlan, drill: list[str], url: str) -> DrillRun:
    from loraplex.platform.cli.drill import app

    arguments = [*drill, "--yes", "--json", "--base-url", url, "--data-dir", plan.data_dir]
    began = time.monotonic()
    result = CliRunner().invoke(app, arguments)
    return DrillRun(
        exit_code=result.exit_code,
        seconds=time.monotonic() - began,
        output=result.stdout,
        errors=result.stderr,
        files=os.listdir(plan.data_dir),
    )


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=DrillPlan)
    Path(plan.data_dir).mkdir(parents=True, exist_ok=True)
    if plan.tmpfs_mib is not None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={plan.tmpfs_mib}m", "tmpfs", plan.data_dir], check=True
        )
    os.environ.update({f"LORAPLEX_{name.upper()}": value for name, value in plan.settings.items()})
    url = f"http://127.0.0.1:{plan.port}"
    supervisor = Supervisor(plan)
    try:
        until(lambda: ready(url), READY_S, "readyz answers 200")
        for drill in plan.drills:
            sys.stdout.buffer.write(msgspec.json.encode(drilled(plan, drill, url)) + b"\n")
            sys.stdout.flush()
    finally:
        supervisor.end()


if __name__ == "__main__":
    main()
