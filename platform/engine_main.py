"""Entry point of the engine process: `python -m loraplex.platform.engine_main`, told what to do on standard input.

Invariant: it ends with its parent. torch is imported only here, after the death signal is armed.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from loraplex.engine.client import EngineClient
from loraplex.engine.fake_engine import FakeEngine
from loraplex.platform import engine_spawn
from loraplex.platform.engine_server import EngineServer
from loraplex.platform.engine_spawn import Broken, EngineSpawn, Ready, Report, Stage
from loraplex.platform.logs import configure_logs
from loraplex.platform.parent_death import die_at_end_of_input, die_with_parent

MAX_SPAWN_BYTES = 1 << 20
START_FAILED_STATUS = 1


class Reporter:
    """Writes reports to the parent; whatever libraries print to standard output goes to standard error instead."""

    def __init__(self) -> None:
        self._pipe: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def __call__(self, report: Report) -> None:
        self._pipe.write(engine_spawn.encode(report) + b"\n")


def main() -> None:
    """Read the spawn message, serve, exit 0 after SIGTERM."""
    report = Reporter()
    spawn = engine_spawn.decode_spawn(sys.stdin.buffer.readline(MAX_SPAWN_BYTES))
    die_with_parent(spawn.parent_pid)
    die_at_end_of_input(sys.stdin.fileno())
    configure_logs(spawn.log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = build_engine(spawn, report)
    except Exception as error:
        report(Broken(f"{type(error).__name__}: {error}"))
        raise
    asyncio.run(_serve(engine, spawn, report))


def build_engine(spawn: EngineSpawn, report: Reporter) -> EngineClient:
    """The scripted engine, or the real one with its adapter source and mask factory."""
    if spawn.fake is not None:
        return FakeEngine(spawn.fake)
    from loraplex.platform.engine_build import build_local_engine

    report(Stage(f"loading the model {Path(spawn.config.model).name}"))
    return build_local_engine(spawn.config)


async def _serve(engine: EngineClient, spawn: EngineSpawn, report: Reporter) -> None:
    server = EngineServer(engine, spawn.address)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await server.start()
    except Exception as error:
        report(Broken(str(error)))
        raise
    report(Ready())
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.drain(), spawn.drain_s)
    await server.close()


if __name__ == "__main__":
    main()
