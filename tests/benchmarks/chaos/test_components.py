"""Processes under the supervisor of the harness: killed ones come back, stopped ones continue, ended ones leave nothing."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.benchmarks.chaos import components
from tests.benchmarks.chaos.components import ServerProcess
from tests.end_to_end.live_server import lives, until

SLEEPS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']); time.sleep(600)"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "RESTART_S", 0.0)


@asynccontextmanager
async def started(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    """A process with a child, ended after the block."""
    process = ServerProcess("sleeper", (sys.executable, "-S", "-c", SLEEPS), {}, tmp_path)
    await process.start()
    try:
        await asyncio.to_thread(until, lambda: len(process.pids) == 2, 60, "both processes run")
        yield process
    finally:
        await process.stop()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    async with started(tmp_path) as process:
        yield process


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_killed_process_is_started_again(server: ServerProcess) -> None:
    first = server.pids
    for process in server.processes:
        process.kill()
    await asyncio.to_thread(until, lambda: len(server.pids - first) == 2, 60, "both run again")
    assert server.restarts == 1 and not any(map(lives, first))


async def test_a_stopped_process_continues(server: ServerProcess) -> None:
    stopped = server.processes
    for process in stopped:
        process.suspend()
    await asyncio.to_thread(
        until, lambda: {state(pid) for pid in server.pids} == {"T"}, 60, "all are stopped"
    )
    for process in stopped:
        process.resume()
    await asyncio.to_thread(until, lambda: {state(pid) for pid in server.pids} == {"S"}, 60, "all continue")
    assert not server.restarts


async def test_an_ended_one_leaves_no_process(tmp_path: Path) -> None:
    async with started(tmp_path) as process:
        below = process.pids
    assert process.pid is None
    await asyncio.to_thread(until, lambda: not any(map(lives, below)), 60, "no process is left")
