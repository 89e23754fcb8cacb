"""What runs in the cluster's folder when a server starts: other programs stay, a PostgreSQL of another origin stops the start."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraplex.platform.datastores.embedded.binaries import POSTGRES_WHEEL
from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity
from loraplex.platform.datastores.embedded.orphans import end_orphans

SLEEP = shutil.which("sleep") or "/bin/sleep"


@contextmanager
def running(program: Path, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A copy of `sleep` as `program`, with the working directory `folder`."""
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(SLEEP, program)
    process = subprocess.Popen([str(program), "60"], cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    folder.mkdir()
    return folder


def test_another_program_in_the_folder_is_left_alone(tmp_path: Path, cluster: Path) -> None:
    with running(tmp_path / "bin" / "shell", cluster) as shell:
        end_orphans(cluster, Identity(), seconds=0.2)
        assert shell.poll() is None


def test_a_server_of_another_origin_is_not_killed(tmp_path: Path, cluster: Path) -> None:
    with running(tmp_path / "usr" / "bin" / "postgres", cluster) as foreign:
        with pytest.raises(ServiceFailed, match=f"processes .{foreign.pid}. use .*cluster; end them first"):
            end_orphans(cluster, Identity(), seconds=0.2)
        assert foreign.poll() is None


def test_a_server_of_another_user_is_not_killed(tmp_path: Path, cluster: Path) -> None:
    with running(tmp_path / POSTGRES_WHEEL / "bin" / "postgres", cluster) as foreign:
        with pytest.raises(ServiceFailed, match="end them first"):
            end_orphans(cluster, Identity(os.geteuid() + 1, os.getegid()), seconds=0.2)
        assert foreign.poll() is None


def test_an_orphan_is_killed(tmp_path: Path, cluster: Path) -> None:
    with running(tmp_path / POSTGRES_WHEEL / "bin" / "postgres", cluster) as orphan:
        (tmp_path / POSTGRES_WHEEL / "bin" / "postgres").unlink()
        end_orphans(cluster, Identity(), seconds=4)
        assert orphan.wait(60) == -9
