"""Entry point of the engine process: `python -m loraplex.platform.engines.main`; standard input has the spawn request.

Invariant: it ends with its parent. torch is imported only in this process, after the death signal is armed.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineError
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.platform.engines import spawn_messages
from loraplex.platform.engines.server import EngineServer
from loraplex.platform.engines.spawn_messages import (
    Broken,
    Described,
    Drained,
    Ready,
    Report,
    SpawnRequest,
    Stage,
)
from loraplex.platform.engines.start_progress import reporting_progress
from loraplex.platform.processes.gc_tuning import freeze_gc, paused_gc
from loraplex.platform.processes.log_files import also_log_to
from loraplex.platform.processes.logs import configure_logs
from loraplex.platform.processes.parent_death import die_at_end_of_input, die_with_parent

MAX_SPAWN_BYTES = 1 << 20
BROKEN_STATUS = 71

EngineOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[EngineClient]]


class Reporter:
    """Writes reports to the parent over the former standard output; output of libraries goes to standard error instead."""

    def __init__(self) -> None:
        self._pipe: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def __call__(self, report: Report) -> None:
        with self._lock:
            self._pipe.write(spawn_messages.encode(report) + b"\n")


def main() -> None:
    """Read the spawn request and serve; exit with status 0 after a drain."""
    report = Reporter()
    spawn = spawn_messages.decode_spawn(sys.stdin.buffer.readline(MAX_SPAWN_BYTES))
    die_with_parent(spawn.parent_pid)
    die_at_end_of_input(sys.stdin.fileno())
    configure_logs(spawn.log_level)
    if spawn.data_dir is not None:
        also_log_to(Path(spawn.data_dir), "engine")
    if spawn.processors:
        # Before torch is imported: its threads, and how many there are, follow from it.
        os.sched_setaffinity(0, spawn.processors)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with reporting_progress(report):
            opener = prepare_engine(spawn, report)
    except EngineError as error:
        # It names the model's file or field: a traceback would add nothing.
        report(Broken(str(error)))
        sys.exit(1)
    except Exception as error:
        report(Broken(f"{type(error).__name__}: {error}"))
        raise
    sys.exit(asyncio.run(_serve(opener, spawn, report)))


def prepare_engine(spawn: SpawnRequest, report: Reporter) -> EngineOpener:
    """Load the model, which blocks, and return the function that opens the engine on a running event loop."""
    if spawn.fake is not None:
        report(Described(spawn.fake.info))
        _load(spawn.fake)
        return partial(_scripted, spawn.fake)
    cores = os.sched_getaffinity(0)
    with paused_gc():
        from loraplex.platform.engines.build import load_engine

    # Importing torch binds this thread to one core, which threads started later would inherit.
    os.sched_setaffinity(0, cores)
    report(Stage(f"loading the model {Path(spawn.config.model).name}"))
    return load_engine(
        spawn.config, cores, lambda text: report(Stage(text)), lambda info: report(Described(info))
    )


def _load(script: FakeScript) -> None:
    ready_at = time.monotonic() + script.load_s
    while (left_s := ready_at - time.monotonic()) > 0:
        if not script.loads_busily:
            time.sleep(left_s)


@asynccontextmanager
async def _scripted(script: FakeScript) -> AsyncIterator[EngineClient]:
    yield FakeEngine(script)


async def _serve(opener: EngineOpener, spawn: SpawnRequest, report: Reporter) -> int:
    """Serve until a drain, by SIGTERM or a gateway's wish, or until the engine is broken. Returns the exit status."""
    async with opener() as engine:
        server = EngineServer(engine, spawn.address)
        on_signal = partial(server.begin_drain, spawn.drain_s)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_signal)
        try:
            await server.start()
        except Exception as error:
            report(Broken(str(error)))
            raise
        freeze_gc()
        report(Ready())
        broken = asyncio.create_task(server.broken.wait())
        drained = asyncio.create_task(_drained(server))
        await asyncio.wait({broken, drained}, return_when=asyncio.FIRST_COMPLETED)
        if server.broken.is_set():
            os._exit(BROKEN_STATUS)  # its threads may hang, and the parent starts a new one
        await server.close()
        if server.was_asked:
            report(Drained())
    return 0


async def _drained(server: EngineServer) -> None:
    await server.draining.wait()
    await server.drain()


if __name__ == "__main__":
    main()
