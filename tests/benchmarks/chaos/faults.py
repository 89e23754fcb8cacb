"""The faults of the matrix: each takes some seconds and leaves the installation to recover.

Invariant: a fault acts from outside, on processes, sockets, disks and clocks. Processes are stopped and disks filled as drills do it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import psutil
import psycopg
from tests.benchmarks.chaos.components import Component
from tests.benchmarks.chaos.world import MIB, World

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.drills.undo import ContinueProcess

COMPONENTS: Final = ("gateway", "engine", "database", "valkey")
KILLS: Final = 2
JUMPS_S: Final = (3600, 0, -3600)
DELAY_S: Final = {"database": 0.25, "valkey": 0.25, "engine": 0.1}
STOPPED_S, RUNNING_S = 0.4, 0.1
"""A starved process gets a fifth of a core."""
FREE_BYTES: Final = MIB
"""What a full disk has at first: the tmpfs of 1 MB that the load then fills."""

Fault = Callable[[World, str, float], Awaitable[None]]


def component_of(world: World, name: str) -> Component:
    return world.components["gateway-0" if name == "gateway" else name]


async def kill(world: World, name: str, seconds: float) -> None:
    """SIGKILL of the main process, twice; what is below it has to end by itself."""
    for _ in range(KILLS):
        for process in component_of(world, name).processes[:1]:
            process.kill()
        await asyncio.sleep(seconds / KILLS)


async def stop(world: World, name: str, seconds: float) -> None:
    """SIGSTOP of all its processes, then SIGCONT."""
    await stop_for(component_of(world, name), seconds)


async def slow(world: World, name: str, seconds: float) -> None:
    """A network that delays everything, and half-way loses the connections that are open; a process that is starved of CPU."""
    if name in ("gateway", "engine"):
        with_network = [delay(world, name, seconds)] if name in world.proxies else []
        await asyncio.gather(starve(component_of(world, name), seconds), *with_network)
        return
    await delay(world, name, seconds)


async def delay(world: World, name: str, seconds: float) -> None:
    """Delay each message. Connections of stores, which may be on other machines, hang from the middle on."""
    proxy = world.proxies[name]
    proxy.delay_s = DELAY_S[name]
    try:
        await asyncio.sleep(seconds / 2)
        if name in world.stores:
            proxy.hang_open_connections()
        await asyncio.sleep(seconds / 2)
    finally:
        proxy.delay_s = 0.0


async def starve(component: Component, seconds: float) -> None:
    """Let the component's processes run a fifth of the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await stop_for(component, STOPPED_S)
        await asyncio.sleep(RUNNING_S)


async def stop_for(component: Component, seconds: float) -> None:
    """As the drill `engine-hang` stops an engine, and takes that back."""
    stopped = component.processes
    ends = [ContinueProcess(each.pid, each.create_time()) for each in stopped]
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        await asyncio.sleep(seconds)
    finally:
        for end in ends:
            await end.run()


async def disk_full(world: World, name: str, seconds: float) -> None:
    """1 MB is left at first and nothing later. PostgreSQL is made to need another file of its write-ahead log as well."""
    disk = world.disks[name]
    disk.fill(FREE_BYTES)
    try:
        await asyncio.sleep(seconds / 3)
        until = time.monotonic() + 2 * seconds / 3
        while time.monotonic() < until:
            disk.fill(0)
            if name == "database":
                await asyncio.to_thread(switch_log, world)
            await asyncio.sleep(0.5)
    finally:
        disk.clear()


def switch_log(world: World) -> None:
    """Begin another file of PostgreSQL's log. On a full disk PostgreSQL panics at that."""
    folder = world.disks["database"].folder
    with (
        suppress(psycopg.OperationalError, psycopg.errors.DiskFull),
        psycopg.connect(
            superuser_url(folder, world.database_url), connect_timeout=2, autocommit=True
        ) as connection,
    ):
        connection.execute(
            "SELECT pg_logical_emit_message(false, 'chaos', repeat('x', 100000)), pg_switch_wal()"
        )


async def clock_jump(world: World, name: str, seconds: float) -> None:
    """Its time of day jumps an hour ahead, back, and an hour behind. Raises `BenchFailed` if the process does not have that clock."""
    clock, pid = world.clocks[name], component_of(world, name).pid
    if pid is None or not clock.is_in(pid):
        raise BenchFailed(f"{name} does not follow the clock that is to jump")
    try:
        for offset_s in JUMPS_S:
            clock.jump_to(offset_s)
            await asyncio.sleep(seconds / len(JUMPS_S))
    finally:
        clock.jump_to(0)


FAULTS: Final[dict[str, Fault]] = {
    "kill": kill,
    "stop": stop,
    "slow": slow,
    "disk-full": disk_full,
    "clock-jump": clock_jump,
}
