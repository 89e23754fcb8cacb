"""A real `loraplex serve` as a process, with its engine, PostgreSQL and Valkey, as it appears from outside."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from openai import OpenAI

from loraplex.engine.messages import EngineStats
from loraplex.platform.demo.demo_file import DemoAccess
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.remote_client import RemoteEngine

RUN = "from loraplex.platform.cli.main import main; main()"
START_S = 180.0
STOP_S = 90.0
# 8,738 tokens in fp32. Zeroing a CPU's own 1 GiB takes seconds of every start.
KV_CACHE_BYTES = 384 << 20


def lives(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> set[int]:
    """All live processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and lives(int(entry.name)):
            try:
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def until(condition: Callable[[], object], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def _stat(pid: int) -> list[str]:
    """State, parent and more, from /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@dataclass
class LiveServer:
    """`output` and `errors` are files that its two streams go to."""

    process: "subprocess.Popen[bytes]"
    data_dir: Path
    output: Path
    errors: Path

    @property
    def banner(self) -> str:
        """The text that it printed when it was ready."""
        return self.output.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"http://[^/\s]+", self.banner)
        assert found, self.banner
        return found[0]

    @property
    def access(self) -> DemoAccess:
        return msgspec.json.decode((self.data_dir / "demo.json").read_bytes(), type=DemoAccess)

    @property
    def engine_pid(self) -> int:
        (pid,) = (pid for pid in descendants(self.process.pid) if "engines.main" in command_line(pid))
        return pid

    def client(self, tenant: int = 0, key: str | None = None) -> OpenAI:
        """The official client with the key of a demo tenant, or `key`."""
        key = key or self.access.tenants[tenant].api_key
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def owners(self) -> dict[str, int]:
        """Adapter or base -> the number of a tenant that may use it."""
        tenants = self.access.tenants
        return {self.access.model: 0} | {name: i for i, each in enumerate(tenants) for name in each.adapters}

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def engine_address(self) -> str:
        """The socket of its own engine."""
        return f"ipc://{self.data_dir}/run/engine.{self.process.pid}.0.sock"

    def engine_stats(self) -> EngineStats:
        """Current statistics, requested from the engine itself."""
        return asyncio.run(engine_stats(self.engine_address))

    def stop(self) -> None:
        """SIGTERM ends it with status 0 and leaves no process."""
        below = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_S) == 0, self.errors.read_text()
        until(lambda: not any(map(lives, below)), 60, "no process is left")


async def engine_stats(address: str) -> EngineStats:
    """Request the statistics of the engine at `address`."""
    engine = RemoteEngine(address, EventBufferConfig())
    engine.start()
    try:
        async with asyncio.timeout(60):
            await engine.wait_ready()
        return await engine.stats()
    finally:
        await engine.close()


@contextmanager
def serving(
    data_dir: Path, model: Path, *arguments: str, settings: Mapping[str, str] | None = None
) -> Iterator[LiveServer]:
    """`loraplex serve --demo …` once it is ready; killed at the end if it still runs."""
    link = data_dir / "models" / model.name
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(model)
    output, errors = (data_dir / f"{name}.{time.monotonic_ns()}" for name in ("output", "errors"))
    command = [sys.executable, "-c", RUN, "serve", "--demo", "--data-dir", str(data_dir), *arguments]
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, env=environment(settings or {}), stdout=out, stderr=err)
    server = LiveServer(process, data_dir, output, errors)
    try:
        _await_start(server)
        yield server
    finally:
        process.kill()
        process.wait()


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of the tests without any setting of loraplex but those of the live demo and `settings`."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("LORAPLEX_") and key not in ("DATABASE_URL", "REDIS_URL")
    }
    own = {"kv_cache_bytes": str(KV_CACHE_BYTES), "drain_grace_s": "0", **settings}
    return inherited | {f"LORAPLEX_{key.upper()}": value for key, value in own.items()}


def _await_start(server: LiveServer) -> None:
    """The banner is printed in one write once all is ready."""
    deadline = time.monotonic() + START_S
    while "Serving" not in server.banner:
        assert server.process.poll() is None, server.errors.read_text()
        assert time.monotonic() < deadline, f"not ready in {START_S:g} s: {server.errors.read_text()}"
        time.sleep(0.05)
    if "http://" in server.banner:
        until(server.ready, 60, "readyz answers 200")
