"""`LocalServer`: the server under test, a `loraplex serve` process with a temporary data directory.

Invariant: it reads no setting and no store of the user's environment, and it ends with the benchmark.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.processes.child_process import python_command
from loraplex.platform.processes.environment import foreign_environment

BASE_MODEL = "bench-base"
READY_S = 120.0
STOP_S = 60.0
HTTP_S = 5.0
RUN = "from loraplex.platform.cli.main import main; main()"
_LOG_TAIL_CHARACTERS = 2000


class LocalServer:
    """A server that can start and stop repeatedly on one data directory; tenants and adapters stay."""

    def __init__(self, folder: Path, model: str, settings: Mapping[str, str], program: str = RUN) -> None:
        """`settings` has the names of `Settings`; a model path becomes absolute. `program`: Python that runs the command line."""
        self.data_dir = folder / "data"
        self.model = str(Path(model).absolute()) if Path(model).exists() else model
        self.settings = dict(settings)
        self.base_url = ""
        self._folder = folder
        self._program = program
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and wait for `/readyz`. Raises `BenchFailed` with the end of the server's log."""
        with self._log_path.open("w") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *python_command("-c", self._program, "serve"),
                cwd=self._folder,
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        stdout = self._process.stdout
        line = "" if stdout is None else (await stdout.readline()).decode(errors="replace")
        match = re.search(r"https?://[^/\s]+", line)
        if match is None:
            raise BenchFailed(f"the server did not start: {self._log_tail()}")
        self.base_url = match[0]
        await self._wait_ready()

    async def plan(self) -> dict[str, Any]:
        """The worksheet of `loraplex plan` for its model and settings. Raises `BenchFailed`."""
        process = await asyncio.create_subprocess_exec(
            *python_command("-c", self._program, "plan", "--json"),
            cwd=self._folder,
            env=self._environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if not output:
            raise BenchFailed(f"`loraplex plan` failed: {errors.decode(errors='replace').strip()}")
        document: dict[str, Any] = json.loads(output)
        return document

    def _environment(self) -> dict[str, str]:
        own = {"model": self.model, "data_dir": str(self.data_dir), "port": "0", "log_level": "warning"}
        own |= {"served_model_name": BASE_MODEL} | self.settings
        return foreign_environment() | {f"LORAPLEX_{name.upper()}": own[name] for name in own}

    async def stop(self) -> None:
        """Drain and stop the process; kill it after `STOP_S` seconds."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        """The process id of the running server. Raises `BenchFailed` when it does not run."""
        if self._process is None:
            raise BenchFailed("the server does not run")
        return self._process.pid

    @property
    def _log_path(self) -> Path:
        return self._folder / "server.log"

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].strip() or "it said nothing"

    async def _wait_ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + READY_S
        while asyncio.get_running_loop().time() < deadline:
            if await is_ready(self.base_url):
                return
            await asyncio.sleep(0.1)
        raise BenchFailed(f"the server was not ready within {READY_S:g} s: {self._log_tail()}")


async def is_ready(base_url: str) -> bool:
    """Whether the gateway at `base_url` says that it can serve."""
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=HTTP_S) as client:
            return (await client.get("/readyz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@asynccontextmanager
async def run_local_server(
    model: str, settings: Mapping[str, str], program: str = RUN
) -> AsyncIterator[LocalServer]:
    """Run a server in a temporary folder, which is removed at the end. `program`: see `LocalServer`."""
    with TemporaryDirectory(prefix="loraplex-bench-") as name:
        server = LocalServer(Path(name), model, settings, program)
        try:
            await server.start()
            yield server
        finally:
            await server.stop()
