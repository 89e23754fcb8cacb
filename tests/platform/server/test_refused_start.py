"""`loraplex serve` as a process that refuses to start: one line of error with what to do, an exit code, nothing left behind."""

import os
import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psycopg
import pytest
from tests.benchmarks.chaos.disks import namespace_command
from tests.platform.server.serve_process import RUN, Serve, model_folder, script, serving, stores, until

from loraplex.platform.processes.child_process import python_command
from loraplex.platform.server.secret import SECRET_FILE

__all__ = ["model_folder", "stores"]


def refused(
    folder: Path,
    model: Path,
    *arguments: str,
    settings: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    preparation: Callable[[], None] | None = None,
) -> tuple[int, str]:
    """Return the exit code and the one line of error."""
    fake = folder / "script.json"
    fake.write_bytes(msgspec.json.encode(script()))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    environment |= {f"LORAPLEX_{key.upper()}": value for key, value in (settings or {}).items()}
    environment |= {"LORAPLEX_FAKE_ENGINE": str(fake)}
    options = ("--port", "0", "--data-dir", str(folder / "data"), "--model", str(model))
    ended = subprocess.run(
        (*prefix, *python_command("-c", RUN, "serve", *options, *arguments)),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        preexec_fn=preparation,
        check=False,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.stderr.endswith(f"{line}\n") and "Serving" not in ended.stdout
    return ended.returncode, line


def test_too_few_descriptors_start_nothing(tmp_path: Path, model_folder: Path) -> None:
    limit = (64, 64)
    code, line = refused(
        tmp_path, model_folder, preparation=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    )
    assert code == 1 and "may open 64 files; a gateway needs 576" in line and "LimitNOFILE" in line
    assert not (tmp_path / "data").exists()


def test_a_lost_secret_is_refused_and_accepted_by_the_flag(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with serving(tmp_path, model_folder, script(), settings=stores) as server:
        server.process.terminate()
        server.process.wait(60)
    code, line = refused(
        tmp_path, model_folder, "--role", "engine", "--engine", "ipc:///tmp/x", "--accept-new-secret"
    )
    assert code == 2 and "an engine has no secret" in line
    secret = tmp_path / "data" / SECRET_FILE
    secret.unlink()
    code, line = refused(tmp_path, model_folder, settings=stores)
    assert code == 1 and "is missing" in line and "`loraplex serve --accept-new-secret`" in line
    assert not secret.exists()
    with serving(tmp_path, model_folder, script(), "--accept-new-secret", settings=stores) as server:
        assert "the new server secret is accepted; voided: 0 webhook secrets" in errors_of(server)
    assert secret.exists()


def errors_of(server: Serve) -> str:
    return (server.folder / "stderr").read_text()


def test_a_signal_ends_a_start_whose_thread_waits_for_the_database(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with psycopg.connect(stores["database_url"]) as held:
        held.execute("LOCK TABLE alembic_version IN ACCESS EXCLUSIVE MODE")
        with serving(tmp_path, model_folder, script(), wait=False, settings=stores) as server:
            waiting = (
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'alembic_version'::regclass"
            )
            until(lambda: held.execute(waiting).fetchone() != (0,))
            server.process.terminate()
            assert server.process.wait(20) == 0


def test_a_second_server_on_the_same_port_is_refused(
    tmp_path: Path, model_folder: Path, stores: dict[str, str]
) -> None:
    with serving(tmp_path, model_folder, script(), settings=stores) as server:
        port = server.url.rpartition(":")[2]
        code, line = refused(tmp_path, model_folder, "--port", port, settings=stores)
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}" in line and "--port" in line


def test_a_tiny_disk_is_named(tmp_path: Path, model_folder: Path) -> None:
    """The embedded PostgreSQL does not fit on it."""
    prefix = namespace_command()
    if not prefix:
        pytest.skip("this user may not mount")
    disk = tmp_path / "data"
    mounting = f'mount -t tmpfs -o size=8m,mode=0711 tmpfs {disk} && exec "$@"'
    disk.mkdir()
    code, line = refused(tmp_path, model_folder, prefix=(*prefix, "sh", "-c", mounting, "sh"))
    assert code == 1 and "No space left on device" in line
