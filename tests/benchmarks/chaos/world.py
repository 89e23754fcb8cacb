"""The installation that faults are injected into: two gateways, an engine, PostgreSQL and Valkey, as processes of their own.

Invariant: gateways reach engine and stores through proxies, the harness reaches the stores directly. Each component has a disk of
its own, and a clock of its own where asked for.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import msgspec
from tests.benchmarks.chaos.clocks import Clock, build_libraries
from tests.benchmarks.chaos.components import Component, ServerProcess, Store
from tests.benchmarks.chaos.disks import Disk
from tests.benchmarks.chaos.slow_proxy import SlowProxy
from tests.end_to_end.billed_load import SETTINGS
from tests.end_to_end.live_server import KV_CACHE_BYTES
from tests.end_to_end.lost_stores import scripted
from tests.platform.free_ports import free_ports
from tests.platform.server.serve_process import RUN

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.datastores.embedded.binaries import (
    PostgresBinaries,
    copy_postgres,
    copy_valkey,
    find_postgres,
    find_valkey,
)
from loraplex.platform.datastores.embedded.identity import Identity, choose_identity
from loraplex.platform.datastores.embedded.postgres import PostgresServer
from loraplex.platform.datastores.embedded.valkey import ValkeyServer
from loraplex.platform.datastores.migrations import upgrade
from loraplex.platform.processes.child_process import python_command
from loraplex.platform.processes.environment import foreign_environment

SERVED_NAME: Final = "chaos"
GATEWAYS: Final = 2
TOKEN_INTERVAL_S: Final = 0.05
REAL_LOAD: Final = 0.2
READY_S: Final = 180.0
MIB: Final = 1 << 20
DISK_BYTES: Final = {"database": 320 * MIB, "valkey": 64 * MIB, "engine": 64 * MIB, "gateway": 192 * MIB}
SHORT_LEASES: Final = """
from functools import partial
from loraplex.platform.server import components
components.AdmissionConfig = partial(components.AdmissionConfig, lease_s=8.0, heartbeat_s=2.0)
"""
"""What a dead gateway has reserved is free again within a cell."""
# No balancer has to learn of the end of an installation. The rest is as in production.
GATEWAY_SETTINGS: Final = SETTINGS | {
    "console": "false",
    "drain_grace_s": "0",
    "log_level": "warning",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """`model`: the folder whose tokenizer is used, and which a real engine serves. `clocks`: the first gateway and everything
    beside the gateways have clocks that can jump.
    """

    model: Path
    scripted: bool = True
    disks: bool = True
    clocks: bool = False

    @property
    def load(self) -> float:
        """The share of the requests that are sent: a real engine on a few cores serves fewer."""
        return 1.0 if self.scripted else REAL_LOAD


class World:
    """A running installation. Components by their names in the matrix; faults of a gateway hit the first one."""

    def __init__(self, plan: WorldPlan, folder: Path) -> None:
        self.load = plan.load
        self._plan, self._folder = plan, folder
        self.disks = {name: Disk(folder / name, size) for name, size in DISK_BYTES.items()}
        self.clocks: dict[str, Clock] = {}
        self.proxies: dict[str, SlowProxy] = {}
        self.stores: dict[str, Store] = {}
        self.processes: dict[str, ServerProcess] = {}
        self.base_urls = [f"http://127.0.0.1:{port}" for port in free_ports(GATEWAYS)]

    @property
    def components(self) -> dict[str, Component]:
        return {**self.stores, **self.processes}

    @property
    def database_url(self) -> str:
        """Past the proxy."""
        return self.stores["database"].url

    @property
    def redis_url(self) -> str:
        """Past the proxy."""
        return self.stores["valkey"].url

    def ready(self) -> bool:
        """Whether every gateway answers that it is."""
        try:
            return all(httpx.get(f"{url}/readyz", timeout=5).status_code == 200 for url in self.base_urls)
        except httpx.TransportError:
            return False

    async def wait_ready(self, within_s: float = READY_S) -> None:
        """Raises `BenchFailed`."""
        deadline = time.monotonic() + within_s
        while not await asyncio.to_thread(self.ready):
            if time.monotonic() > deadline:
                raise BenchFailed(
                    f"the installation was not ready within {within_s:g} s; logs: {self._folder}"
                )
            await asyncio.sleep(0.1)

    async def open(self, stack: AsyncExitStack) -> None:
        """Start everything; `stack` ends it."""
        for name, disk in self.disks.items():
            self._prepare(name, disk, stack)
        if self._plan.clocks:
            libraries = build_libraries(self._folder)
            self.clocks = {name: Clock(libraries, self._folder / f"{name}.clock") for name in self.disks}
        self._make_stores()
        for store in self.stores.values():
            stack.push_async_callback(store.stop)
        await asyncio.gather(*(store.start() for store in self.stores.values()))
        await asyncio.to_thread(upgrade, self.database_url)
        behind = {name: store.socket for name, store in self.stores.items()}
        for name, upstream in (behind | {"engine": self._engine_socket}).items():
            folder = self._folder / f"{name}-proxy"
            folder.mkdir(mode=0o700)
            proxy = SlowProxy(folder / upstream.name, upstream)
            self.proxies[name] = await stack.enter_async_context(proxy)
        for process in self._make_processes():
            self.processes[process.name] = process
            stack.push_async_callback(process.stop)
            await process.start()
        await self.wait_ready()

    @property
    def _engine_socket(self) -> Path:
        return self._folder / "engine" / "run" / "engine.sock"

    def _prepare(self, name: str, disk: Disk, stack: AsyncExitStack) -> None:
        disk.folder.mkdir(mode=0o711)
        if self._plan.disks:
            disk.mount()
            stack.callback(disk.unmount)

    def _make_stores(self) -> None:
        identity = choose_identity(self.disks["database"].folder / "postgres")
        binaries, valkey = find_postgres(), find_valkey()
        if not identity.may_traverse(binaries.server) or not identity.may_traverse(valkey):
            binaries, valkey = self._copied(identity, binaries, valkey)
        if self.clocks:
            script = self.clocks["database"].wrapped(binaries.server, self._folder / "postgres.sh")
            binaries = ClockedBinaries(binaries.major, binaries.root, script)
            valkey = self.clocks["valkey"].wrapped(valkey, self._folder / "valkey.sh")
        database = PostgresServer(self.disks["database"].folder, binaries, identity)
        self.stores["database"] = Store("database", database)
        self.stores["valkey"] = Store("valkey", ValkeyServer(self.disks["valkey"].folder, valkey, identity))

    def _copied(
        self, identity: Identity, binaries: PostgresBinaries, valkey: Path
    ) -> tuple[PostgresBinaries, Path]:
        folder = self._folder / "binaries"
        folder.mkdir(mode=0o711)
        if not identity.may_traverse(folder / "postgres"):
            raise BenchFailed(f"uid {identity.uid} cannot reach {folder}: point TMPDIR to another folder")
        return copy_postgres(binaries, folder), copy_valkey(valkey, folder)

    def _make_processes(self) -> list[ServerProcess]:
        memory = {"kv_cache_bytes": str(KV_CACHE_BYTES)}
        engine = self._serve("engine", "engine", ("--engine", f"ipc://{self._engine_socket}"), memory)
        host = self.proxies["database"].path.parent
        stores = {
            "database_url": f"{self.database_url.partition('?')[0]}?host={host}",
            "redis_url": self.redis_url.replace(
                str(self.stores["valkey"].socket), str(self.proxies["valkey"].path)
            ),
            **GATEWAY_SETTINGS,
        }
        gateways = []
        for number, url in enumerate(self.base_urls):
            options = ("--engine", f"ipc://{self.proxies['engine'].path}", "--port", url.rpartition(":")[2])
            # Faults hit the first gateway: the other one has a disk and a clock as they were.
            gateways.append(
                self._serve(f"gateway-{number}", "gateway" if number == 0 else "", options, stores)
            )
        return [engine, *gateways]

    def _serve(
        self, name: str, faulty: str, options: tuple[str, ...], settings: dict[str, str]
    ) -> ServerProcess:
        role = name.partition("-")[0]
        data = (self.disks[faulty].folder if faulty else self._folder) / name
        environment = foreign_environment()
        environment |= {f"LORAPLEX_{key.upper()}": value for key, value in settings.items()}
        environment["LORAPLEX_SECRET"] = "chaos-" + "0" * 32
        model = (
            ("--model", str(self._plan.model)) if role == "engine" else ("--served-model-name", SERVED_NAME)
        )
        if role == "engine" and self._plan.scripted:
            script = self._folder / "script.json"
            script.write_bytes(msgspec.json.encode(scripted(TOKEN_INTERVAL_S)))
            environment["LORAPLEX_FAKE_ENGINE"] = str(script)
        if faulty in self.clocks:
            environment |= self.clocks[faulty].environment
        arguments = ("serve", "--role", role, "--data-dir", str(data), *model, *options)
        program = SHORT_LEASES + RUN if role == "gateway" else RUN
        return ServerProcess(name, python_command("-c", program, *arguments), environment, self._folder)


@dataclass(frozen=True)
class ClockedBinaries(PostgresBinaries):
    """A PostgreSQL whose server is started by a script."""

    script: Path

    @property
    def server(self) -> Path:
        return self.script


@asynccontextmanager
async def opened_world(plan: WorldPlan, progress: Callable[[str], None]) -> AsyncIterator[World]:
    """Start an installation, and end it with all its processes. Raises `BenchFailed`."""
    with TemporaryDirectory(prefix="loraplex-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o711)
        async with AsyncExitStack() as stack:
            world = World(plan, folder)
            progress("starting two gateways, an engine, PostgreSQL and Valkey")
            await world.open(stack)
            yield world
