"""A fault says what it cannot do before it does anything, hits what it names, and finds a promise that is broken."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from tests.platform.server.serve_process import until

from loraplex.platform.config import load_settings
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.db_outage import DatabaseOutage
from loraplex.platform.drills.faults.disk_full import DiskFull, fill, free_bytes
from loraplex.platform.drills.faults.engine_loss import EngineKill
from loraplex.platform.drills.faults.fault import Observed
from loraplex.platform.drills.faults.gateway_kill import GatewayKill
from loraplex.platform.drills.installation import Installation, find_installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.traffic import RequestOutcome
from loraplex.platform.server.gateway_address import GatewayAddress, announced
from loraplex.platform.startup_errors import DependencyFailed

NOTHING = Observed([], 0.0, 1.0, LedgerDrift())
GATEWAY = """
import subprocess, sys
lock = open(sys.argv[1], "w")
subprocess.run([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", "loraplex.platform.engines.main"])
"""


def installation(
    data_dir: Path, *base_urls: str, database_url: str = "postgresql://u:p@/name", **settings: object
) -> Installation:
    found = load_settings({"data_dir": data_dir, **settings})
    return Installation(found, database_url, "redis://127.0.0.1:1", base_urls or ("http://127.0.0.1:1",))


@contextmanager
def gateway(data_dir: Path, name: str = "1") -> Iterator["subprocess.Popen[bytes]"]:
    """A process with the lock of a journal open, and a child that has the name of an engine."""
    (data_dir / "journal").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", GATEWAY, str(data_dir / "journal" / f"{name}.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = installation(data_dir).engines()
        try:
            yield process
        finally:
            process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


@asynccontextmanager
async def answering(status: int) -> AsyncIterator[str]:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_a_gateway_is_the_process_that_has_the_journal(tmp_path: Path) -> None:
    with gateway(tmp_path / "mine") as mine, gateway(tmp_path / "other") as other:
        assert [each.pid for each in installation(tmp_path / "mine").gateways()] == [mine.pid]
        assert [each.pid for each in installation(tmp_path / "other").gateways()] == [other.pid]
        assert installation(tmp_path / "none").gateways() == []


async def test_a_killed_gateway_is_started_by_the_command_that_was_given(tmp_path: Path) -> None:
    started = tmp_path / "started"
    async with answering(200) as url:
        with gateway(tmp_path / "data") as process:
            found = installation(tmp_path / "data", url)
            fault = GatewayKill(installation=found, seconds=60.0, restart=f"touch '{started}'")
            await fault.check()
            assert str(process.pid) in fault.plan() and str(started) in fault.plan()
            await fault.begin()
            assert process.wait() == -9
            await fault.last([])
        (promise,) = await fault.promises(NOTHING)
        assert promise.kept
        until(started.exists)


async def test_a_gateway_that_does_not_come_back_breaks_the_promise(tmp_path: Path) -> None:
    async with answering(503) as url:
        with gateway(tmp_path / "data"):
            fault = GatewayKill(installation=installation(tmp_path / "data", url), seconds=0.3, restart=None)
            await fault.check()
            await fault.begin()
            await fault.last([])
        (promise,) = await fault.promises(NOTHING)
        assert not promise.kept


async def test_an_engine_that_no_other_replaces_breaks_the_promise(tmp_path: Path) -> None:
    with gateway(tmp_path / "data"):
        fault = EngineKill(installation=installation(tmp_path / "data"), seconds=60.0)
        with pytest.raises(DrillImpossible):
            fault.plan()
        await fault.check()
        await fault.begin()
        await fault.last([])
        (promise,) = await fault.promises(NOTHING)
        assert not promise.kept and promise.found == "none was started"


async def test_an_engine_that_ran_before_replaces_none(tmp_path: Path) -> None:
    with gateway(tmp_path / "data"), gateway(tmp_path / "data", "2"):
        found = installation(tmp_path / "data", engine=["ray://loraplex"])
        fault = EngineKill(installation=found, seconds=60.0)
        await fault.check()
        await fault.begin()
        await fault.last([])
        (promise,) = await fault.promises(NOTHING)
        assert not promise.kept and promise.found == "none was started"


async def test_what_does_not_run_here_cannot_be_killed(tmp_path: Path) -> None:
    found = installation(tmp_path)
    for fault in (
        GatewayKill(installation=found, seconds=1.0, restart=None),
        EngineKill(installation=found, seconds=1.0),
    ):
        with pytest.raises(DrillImpossible, match="runs on this machine"):
            await fault.check()


async def test_an_outage_needs_the_owner_of_the_database(tmp_path: Path, database_url: str) -> None:
    name = f"foreign_{os.getpid()}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'pw'".encode())
        try:
            foreign = f"postgresql://{name}:pw@/{connection.info.dbname}?host={connection.info.host}"
            found = installation(tmp_path, database_url=foreign)
            with pytest.raises(DrillImpossible, match="must own the database"):
                await DatabaseOutage(installation=found, seconds=1.0).check()
        finally:
            connection.execute(f"DROP ROLE {name}".encode())
    own = installation(tmp_path, database_url=database_url)
    await DatabaseOutage(installation=own, seconds=1.0).check()
    brief = installation(tmp_path, database_url=database_url, known_caller_s=1.0)
    with pytest.raises(DrillImpossible, match="known_caller_s"):
        await DatabaseOutage(installation=brief, seconds=1.0).check()


async def test_an_outage_needs_another_database_to_end_it_from(tmp_path: Path) -> None:
    for address in ("postgresql://u:p@/postgres?host=/nonexistent", "postgresql://u:p@/x?host=/nonexistent"):
        with pytest.raises(DrillImpossible):
            await DatabaseOutage(
                installation=installation(tmp_path, database_url=address), seconds=1.0
            ).check()


async def test_more_free_space_than_allowed_is_not_taken(tmp_path: Path) -> None:
    fault = DiskFull(
        installation=installation(tmp_path),
        seconds=1.0,
        max_ballast_bytes=1 << 20,
        ballast=DiskFull.ballast_of(tmp_path),
    )
    with pytest.raises(DrillImpossible, match="--max-ballast"):
        await fault.check()
    assert str(fault.ballast) in fault.plan()


def test_ballast_is_bounded_and_takes_space(tmp_path: Path) -> None:
    before = free_bytes(tmp_path)
    size = fill(tmp_path / "ballast", 3 << 20)
    assert size == (tmp_path / "ballast").stat().st_size == 3 << 20
    assert (tmp_path / "ballast").stat().st_blocks * 512 >= 3 << 20
    assert before > 3 << 20


async def test_a_full_disk_that_refuses_nothing_or_charges_breaks_promises(tmp_path: Path) -> None:
    found = installation(tmp_path)
    fault = DiskFull(installation=found, seconds=1.0, max_ballast_bytes=1, ballast=tmp_path / "b")
    refused = RequestOutcome("r", 0.0, 1.0, 507, "storage_full", False, None, 0)
    kept = [promise.kept for promise in await fault.promises(Observed([refused], 0, 1, LedgerDrift()))]
    broken = [
        promise.kept for promise in await fault.promises(Observed([], 0, 1, LedgerDrift(refused_rows=1)))
    ]
    assert (kept, broken) == ([True, True], [False, False])


async def test_a_drill_needs_a_running_installation(tmp_path: Path) -> None:
    with pytest.raises(DependencyFailed, match="no installation there"):
        await find_installation(load_settings({"data_dir": tmp_path}), ())
    for folder in ("embedded/postgres", "journal"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DrillImpossible, match="no server runs"):
        await find_installation(load_settings({"data_dir": tmp_path}), ())
    stores = {"database_url": "postgresql://u:p@/name", "redis_url": "redis://127.0.0.1:1"}
    settings = load_settings({"data_dir": tmp_path, **stores})
    async with answering(503) as url:
        with pytest.raises(DrillImpossible, match="not ready"):
            await find_installation(settings, [url])
    async with answering(200) as url:
        assert (await find_installation(settings, [url])).base_urls == (url,)
    with pytest.raises(DrillImpossible, match="no gateway runs on .*--base-url"):
        await find_installation(settings, [])
    with (
        announced(tmp_path, GatewayAddress("https://127.0.0.1:1", None)),
        pytest.raises(DrillImpossible, match="https://127.0.0.1:1 is not ready"),
    ):
        await find_installation(settings, [])
