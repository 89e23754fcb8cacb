"""The processes of an installation under test, each kept running by a supervisor as systemd would.

Invariant: a component that ended is started again `RESTART_S` later, until `stop`; nothing that it started outlives it.
"""

import asyncio
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
from tests.end_to_end.live_server import descendants

from loraplex.platform.datastores.embedded.errors import EmbeddedError
from loraplex.platform.datastores.embedded.postgres import PostgresServer
from loraplex.platform.datastores.embedded.valkey import ValkeyServer

RESTART_S: Final = 1.0
POLL_S: Final = 0.1
TERMINATE_S: Final = 20.0


class Component(ABC):
    """A process and its descendants. Subclasses say how it starts, whether it runs and how it ends; these calls may block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.restarts = 0
        # Embedded servers die with the thread that started them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"chaos-{name}")
        self._keeper: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The main process, None while there is none."""

    @abstractmethod
    def launch(self) -> None:
        """Start the process."""

    @abstractmethod
    def end(self) -> None:
        """End it and all below it."""

    @property
    def pids(self) -> set[int]:
        """The main process and all below it."""
        pid = self.pid
        return set() if pid is None else {pid} | descendants(pid)

    @property
    def processes(self) -> list[psutil.Process]:
        """Every process, the main one first."""
        main = self.pid
        try:
            process = None if main is None else psutil.Process(main)
            return [] if process is None else [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def start(self) -> None:
        """Start it and supervise it from now on."""
        await self._run(self.launch)
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the supervision and the process."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._run(self.end)
        self._thread.shutdown()

    async def _run(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self.pid is None:
                await asyncio.sleep(RESTART_S)
                self.restarts += 1
                with suppress(EmbeddedError):  # it is started again, as long as it takes
                    await self._run(self.launch)


class ServerProcess(Component):
    """A process that runs until it is terminated."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        super().__init__(name)
        self._command, self._environment, self._folder = command, environment, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def launch(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log
            )

    def end(self) -> None:
        if self._process is None:
            return
        everything = self.pids
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_S)
        for pid in everything:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Store(Component):
    """A PostgreSQL or a Valkey of the product's own embedded code. `url` is set once it has started."""

    def __init__(self, name: str, server: PostgresServer | ValkeyServer) -> None:
        super().__init__(name)
        self._server = server
        self.url = ""

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.running() else None

    @property
    def socket(self) -> Path:
        return self._server.data / self._server.socket_name

    def launch(self) -> None:
        self.url = self._server.start(self._server.data)

    def end(self) -> None:
        self._server.stop()
