"""Every fault of a data directory, at the start: the server starts and leaves it alone, or it ends by one error that names it.

The folders and files are those that a demo has made, so that a new one is met here without a change of this file.
"""

import asyncio
import errno
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import pytest
from tests.platform.demo.conftest import demo_model
from tests.platform.server.serve_process import script

from loraplex.adapters.errors import BlobStoreUnavailable
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.secret import SECRET_FILE
from loraplex.platform.server.serve import _serve_gateway, one_line_errors
from loraplex.platform.startup_errors import DependencyFailed, MachineUnfit, StartError
from loraplex.tenants.errors import DatabaseUnavailable, JournalUnreadable, ValkeyUnavailable

__all__ = ["demo_model"]

CLUSTER: Final = "embedded/postgres"
OF_THE_CLUSTER: Final = ("PG_VERSION", "global/pg_control", "postgresql.conf", "pg_hba.conf")
"""What is broken in PostgreSQL's own folder: its other files are PostgreSQL's to check."""
STRAY: Final = "stray file.tmp"
OWN_FOLDERS: Final = {"adapters/.staging", "objects/spool", "embedded"}
START_S: Final = 240.0
ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{64}|(?<=engine\.)[0-9]+|tmp\w{8}")

Break = Callable[[Path], None]


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def corrupted(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(max(64, path.stat().st_size)))


def removed(path: Path) -> None:
    path.unlink()


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def as_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"a file")


def with_strays(folder: Path) -> None:
    (folder / STRAY).write_bytes(b"stray")
    (folder / f"empty {STRAY}").touch()
    (folder / "stray folder").mkdir()
    (folder / "dangling").symlink_to("/nonexistent")
    for suffix in ("json", "sqlite", "lock", "sock", "password"):
        (folder / f"stray.{suffix}").write_bytes(b"stray")


OF_FILES: Final = (emptied, truncated, corrupted, removed, as_folder)
OF_FOLDERS: Final = (as_file, with_strays)


async def start(data_dir: Path, model: Path, while_serving: Callable[[], object] | None = None) -> str | None:
    """Start a demo in this process with a scripted engine; return its one error, None where it started. Other errors are raised."""
    fake = data_dir.with_name("script.json")
    fake.write_bytes(msgspec.json.encode(script()))
    given: dict[str, object] = {"model": str(model), "demo": True, "data_dir": data_dir, "port": 0}
    settings: Settings = load_settings(given | {"fake_engine": fake, "drain_grace_s": 0, "drain_s": 1})
    shutdown = Shutdown(starting=asyncio.current_task())

    async def serve() -> None:
        with one_line_errors(shutdown, data_dir):
            await _serve_gateway(settings, shutdown)

    serving = asyncio.create_task(serve())
    try:
        async with asyncio.timeout(START_S):
            while shutdown.starting is not None and not serving.done():
                await asyncio.sleep(0.02)
            if while_serving is not None and not serving.done():
                await asyncio.to_thread(while_serving)
            shutdown.drain.set()
            await serving
    except StartError as error:
        assert error.exit_code in (1, 2) and str(error).strip()
        return str(error)
    return None


def copy(source: Path, target: Path) -> None:
    """With sockets and owners, as `cp` does."""
    subprocess.run(("cp", "-a", str(source), str(target)), check=True)


@pytest.fixture(scope="module")
def served(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory as a killed demo leaves it, with all that only a running server has."""
    folder = tmp_path_factory.mktemp("served")
    made = folder / "made"
    assert asyncio.run(start(made, demo_model, lambda: copy(made, folder / "killed"))) is None
    return folder / "killed"


def kinds(data_dir: Path) -> tuple[list[str], list[str]]:
    """The files and the folders of a data directory, one of those whose names differ in an id alone."""
    found: dict[str, Path] = {}
    for path in sorted(data_dir.rglob("*")):
        name = path.relative_to(data_dir).as_posix()
        if not name.startswith(f"{CLUSTER}/") or name.removeprefix(f"{CLUSTER}/") in OF_THE_CLUSTER:
            found.setdefault(ID.sub("ID", name), path)
    names = [path.relative_to(data_dir).as_posix() for path in found.values()]
    return (
        [each for each in names if not (data_dir / each).is_dir()],
        [each for each in names if (data_dir / each).is_dir()],
    )


def broken(served: Path, folder: Path, faults: Iterable[tuple[Break, str]]) -> Path:
    """A copy of the data directory with these faults."""
    data_dir = folder / "data"
    if data_dir.exists():
        shutil.rmtree(data_dir)
    copy(served, data_dir)
    for fault, name in faults:
        if not (data_dir / name).is_socket() or fault in (removed, as_folder):
            fault(data_dir / name)
    return data_dir


def derived(files: Iterable[str]) -> list[str]:
    """The files which a start makes anew, repairs, or needs for one tenant alone."""
    return [each for each in files if not each.startswith("embedded/") and each != SECRET_FILE]


async def test_strays_in_every_folder_are_left_alone(served: Path, demo_model: Path, tmp_path: Path) -> None:
    folders = [".", *kinds(served)[1]]
    data_dir = broken(served, tmp_path, ((with_strays, each) for each in folders))
    assert await start(data_dir, demo_model) is None
    kept = [each for each in folders if (data_dir / each / STRAY).exists()]
    # The folders of what is under way belong to the server alone.
    assert set(folders) - set(kept) <= OWN_FOLDERS


async def test_damaged_files_that_a_start_can_do_without_stop_none(
    served: Path, demo_model: Path, tmp_path: Path
) -> None:
    faults = [(corrupted, each) for each in derived(kinds(served)[0])]
    assert len(faults) >= 8
    assert await start(broken(served, tmp_path, faults), demo_model) is None


@pytest.mark.parametrize(
    ("fault", "name", "reason"),
    [
        (emptied, f"{CLUSTER}/PG_VERSION", "PG_VERSION is damaged: restore a backup"),
        (removed, f"{CLUSTER}/PG_VERSION", "has no PG_VERSION"),
        (corrupted, f"{CLUSTER}/global/pg_control", "PostgreSQL ended with status"),
        (corrupted, "embedded/services.json", "services.json is damaged; remove it"),
        (corrupted, "embedded/postgres.password", "postgres.password"),
        (as_folder, "embedded/valkey.password", "valkey.password"),
        (as_file, "embedded/valkey", "embedded/valkey"),
        (as_file, "journal", "journal"),
    ],
)
async def test_what_a_start_needs_is_named(
    served: Path, demo_model: Path, tmp_path: Path, fault: Break, name: str, reason: str
) -> None:
    refusal = await start(broken(served, tmp_path, [(fault, name)]), demo_model)
    assert refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        (DatabaseUnavailable("PostgreSQL did not answer"), DependencyFailed, ""),
        (ValkeyUnavailable("Valkey did not answer"), DependencyFailed, ""),
        (BlobStoreUnavailable("the blob store could not list"), DependencyFailed, ""),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), DependencyFailed, ""),
        (JournalUnreadable("it is damaged"), MachineUnfit, ""),
        (OSError(errno.EMFILE, "Too many open files"), MachineUnfit, "; raise the limit of open files"),
        (OSError(errno.ENOSPC, "No space left on device"), MachineUnfit, "; free some room on the disk"),
        (OSError(errno.EIO, "Input/output error", "x.json"), MachineUnfit, "; repair it or move it out of"),
        (PermissionError(errno.EACCES, "denied", "x.json"), MachineUnfit, "; let this user read and write"),
    ],
)
async def test_only_a_named_file_is_to_be_moved(
    tmp_path: Path, error: Exception, kind: type[StartError], remedy: str
) -> None:
    shutdown = Shutdown(starting=asyncio.current_task())
    with pytest.raises(StartError) as raised, one_line_errors(shutdown, tmp_path):
        raise error
    assert raised.type is kind
    line = f"the start failed: {error}"
    assert str(raised.value).startswith(line + remedy) if remedy else str(raised.value) == line


@pytest.mark.long
@pytest.mark.parametrize("fault", [*OF_FILES, *OF_FOLDERS], ids=lambda each: each.__name__)
async def test_each_fault_of_each_file_and_folder(
    served: Path, demo_model: Path, tmp_path: Path, fault: Break
) -> None:
    """An error that is no `StartError` would be a traceback."""
    files, folders = kinds(served)
    for name in files if fault in OF_FILES else folders:
        refusal = await start(broken(served, tmp_path, [(fault, name)]), demo_model)
        print(f"{fault.__name__:12} {ID.sub('ID', name):60} {'started' if refusal is None else refusal}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.long
async def test_a_file_without_permission_is_named(served: Path, demo_model: Path, tmp_path: Path) -> None:
    for name in ("embedded/postgres.password", SECRET_FILE):
        data_dir = broken(served, tmp_path, [])
        (data_dir / name).chmod(0)
        refusal = await start(data_dir, demo_model)
        assert refusal is not None and name in refusal
