"""Sockets of dead servers are removed; a data directory too deep for a socket gets a short one elsewhere."""

import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from loraplex.platform.engines import wire
from loraplex.platform.engines.startup import _own_address


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_stale_sockets_go_and_live_ones_stay(tmp_path: Path) -> None:
    ended = ended_process()
    run = tmp_path / "run"
    run.mkdir()
    stale, live = run / f"engine.{ended}.sock", run / f"engine.{os.getppid()}.sock"
    for file in (stale, live, run / "other"):
        file.touch()
    async with AsyncExitStack() as stack:
        address = _own_address(tmp_path, stack)
    assert wire.socket_path(address).parent == run
    assert sorted(file.name for file in run.iterdir()) == sorted([live.name, "other"])


async def test_a_deep_data_directory(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        path = wire.socket_path(_own_address(tmp_path / ("deep" * 30), stack))
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()
