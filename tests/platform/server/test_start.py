"""The start of `serve`: what it imports before and beside its engine, and that one part's failure ends all parts by its name."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
import psutil
import psycopg
import pytest
from tests.end_to_end.live_server import command_line
from tests.platform.database_proxy import proxied
from tests.platform.server.serve_process import model_folder, script, stores

from loraplex.platform.config import load_settings
from loraplex.platform.processes.child_process import python_command
from loraplex.platform.server import resources, serve_gateway
from loraplex.platform.server import start as start_stages
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.serve import _serve_gateway
from loraplex.platform.startup_errors import DependencyFailed, EngineStartFailed, StageHung

__all__ = ["model_folder", "stores"]

BEFORE_THE_ENGINE: Final = ("loraplex.platform.cli.serve", "loraplex.platform.server.serve")
BESIDE_THE_ENGINE: Final = (*BEFORE_THE_ENGINE, "loraplex.platform.server.serve_gateway")
NEVER: Final = {
    *("torch", "triton", "numba", "transformers", "xgrammar", "llguidance"),
    *("alembic", "boto3", "aioboto3", "pandas", "scipy", "ray"),
}
AFTER_THE_ENGINE: Final = {
    "fastapi",
    "uvicorn",
    "httpx",
    "jinja2",
    "redis",
    "sqlalchemy",
    "psycopg",
    "tokenizers",
    "numpy",
}


@pytest.mark.parametrize(
    ("modules", "absent"), [(BEFORE_THE_ENGINE, NEVER | AFTER_THE_ENGINE), (BESIDE_THE_ENGINE, NEVER)]
)
def test_a_start_imports_nothing_heavy(modules: tuple[str, ...], absent: set[str]) -> None:
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    ended = subprocess.run(python_command("-c", program), check=True, capture_output=True, text=True)
    assert not absent & set(ended.stdout.split())


async def start(folder: Path, model: Path, stores: dict[str, str]) -> None:
    """Run `serve` in this process, with the scripted engine as its child, until its start fails."""
    folder.joinpath("script.json").write_bytes(msgspec.json.encode(script()))
    settings = load_settings(
        {
            "model": str(model),
            "data_dir": folder / "data",
            "port": 0,
            "fake_engine": folder / "script.json",
            **stores,
        }
    )
    async with asyncio.timeout(60):
        await _serve_gateway(settings, Shutdown())


def engines() -> list[int]:
    """Those of the starts in this process: an engine of a server that other tests share is a child of that server."""
    return [each.pid for each in psutil.Process().children() if "engines.main" in command_line(each.pid)]


async def started_engine() -> int:
    async with asyncio.timeout(60):
        while not engines():
            await asyncio.sleep(0.01)
    return engines()[0]


@contextmanager
def silent_server() -> Iterator[str]:
    """The address of a database that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"postgresql://u:canary@127.0.0.1:{server.getsockname()[1]}/d"


@pytest.fixture
async def no_engine_left() -> AsyncIterator[None]:
    yield
    assert not engines()


@pytest.mark.usefixtures("no_engine_left")
async def test_a_database_that_cannot_be_reached_ends_a_loading_engine(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    starting = asyncio.create_task(
        start(tmp_path, model_folder, stores | {"database_url": "postgresql://u:canary@/d?host=/nonexistent"})
    )
    os.kill(await started_engine(), signal.SIGSTOP)
    with pytest.raises(DependencyFailed, match="the database could not be checked") as error:
        await starting
    assert "canary" not in str(error.value)


@pytest.mark.usefixtures("no_engine_left")
@pytest.mark.parametrize(
    ("silent", "reason"),
    [("database_url", "the database could not be checked"), ("redis_url", "valkey: Valkey did not answer")],
)
async def test_a_store_that_accepts_and_never_answers_ends_the_start(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], silent: str, reason: str
) -> None:
    with silent_server() as address:
        given = address if silent == "database_url" else address.replace("postgresql://u:canary@", "redis://")
        given = given.removesuffix("/d") if silent == "redis_url" else given
        with pytest.raises(DependencyFailed, match=reason):
            await start(tmp_path, model_folder, stores | {silent: given})


@pytest.mark.usefixtures("no_engine_left")
async def test_a_database_that_hangs_after_the_login_is_named_by_its_stage(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock, as of a migration that another process has left open, is what a reader waits for without an end."""
    monkeypatch.setattr(start_stages, "STAGE_SECONDS", 2.0)
    with psycopg.connect(stores["database_url"]) as held:
        held.execute("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        starting = asyncio.create_task(start(tmp_path, model_folder, stores))
        with pytest.raises(StageHung, match="hung for 2 s at: checking the database's schema"):
            await starting


@pytest.mark.usefixtures("no_engine_left")
@pytest.mark.parametrize(
    ("module", "step", "stage"),
    [
        (resources, "warn_of_shadowed_adapters", "reading names and prices"),
        # What is open by then has half a minute to close.
        pytest.param(serve_gateway, "first_run_notice", "looking for an operator", marks=pytest.mark.long),
    ],
)
async def test_a_database_that_stops_during_a_start_is_named_by_the_stage(
    tmp_path: Path,
    model_folder: Path,
    stores: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    step: str,
    stage: str,
) -> None:
    monkeypatch.setattr(start_stages, "STAGE_SECONDS", 2.0)
    async with proxied(stores["database_url"]) as proxy:
        work = getattr(module, step)
        with ExitStack() as held:

            async def stop_then_work(*arguments: Any, **named: Any) -> Any:
                held.enter_context(proxy.silent())
                return await work(*arguments, **named)

            monkeypatch.setattr(module, step, stop_then_work)
            with pytest.raises(StageHung, match=f"hung for 2 s at: {stage}"):
                await start(tmp_path, model_folder, stores | {"database_url": proxy.url})


@pytest.mark.usefixtures("no_engine_left")
async def test_an_engine_that_ends_ends_the_wait_for_a_database(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with silent_server() as address:
        starting = asyncio.create_task(start(tmp_path, model_folder, stores | {"database_url": address}))
        os.kill(await started_engine(), signal.SIGKILL)
        with pytest.raises(EngineStartFailed, match="the engine ended with status -9 before it was ready"):
            await starting


@pytest.mark.usefixtures("no_engine_left")
async def test_a_signal_ends_a_start_whose_engine_and_database_hang(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with silent_server() as address:
        starting = asyncio.create_task(start(tmp_path, model_folder, stores | {"database_url": address}))
        os.kill(await started_engine(), signal.SIGSTOP)
        starting.cancel()  # what a signal does
        with pytest.raises(asyncio.CancelledError):
            await starting


@pytest.mark.usefixtures("no_engine_left")
@pytest.mark.parametrize(
    ("revision", "remedy"), [("0001", "run `loraplex migrate`"), ("9999", "start the newer version")]
)
async def test_another_schema_is_refused_while_the_engine_loads(
    tmp_path: Path, model_folder: Path, stores: dict[str, str], revision: str, remedy: str
) -> None:
    with psycopg.connect(stores["database_url"], autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = %s", (revision,))
    with pytest.raises(DependencyFailed, match=f"is at revision {revision}, this version needs .*: {remedy}"):
        await start(tmp_path, model_folder, stores)
