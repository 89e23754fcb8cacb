"""The command line: quick help without torch, clear errors, exit codes."""

import gc
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from loraplex.platform.cli.main import main

RUN = "import sys; from loraplex.platform.cli.main import main; main()"


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command run in this process sends its logs to the runner's standard error, which is closed afterwards."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def loraplex(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_help_names_every_command_and_imports_little(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom loraplex.platform.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'sqlalchemy', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    for name in ("serve", "tenant", "key", "adapter", "migrate", "doctor"):
        assert name in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(tmp_path: Path) -> None:
    assert loraplex("--version", folder=tmp_path).stdout.startswith("loraplex ")


def test_unknown_commands_and_options_exit_2(tmp_path: Path) -> None:
    assert loraplex("swerve", folder=tmp_path).returncode == 2
    assert loraplex("serve", "--colour", "red", folder=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float8"], ["dtype", "float8", "bfloat16"]),
        (["--quantization", "int3", "--model", "m"], ["quantization", "int3", "fp8"]),
        (["--config", "none.toml"], ["none.toml"]),
        ([], ["model", "--demo"]),
        (["--role", "engine", "--model", "m"], ["engine", "exactly one"]),
        (["--role", "gateway"], ["engine", "at least one"]),
        (["--model", "m", "--engine", "ipc:///tmp/e"], ["engine", "gateway"]),
        (["--role", "engine", "--model", "m", "--engine", "tcp://1"], ["engine", "tcp://1", "ipc://"]),
    ],
)
def test_wrong_settings_exit_2_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2, done.stderr
    assert gc.isenabled(), "a caller in this process goes on"
    assert not (tmp_path / ".loraplex").exists()
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = loraplex("serve", "--model", "m", "--port", str(port), folder=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr and "taken" in done.stderr
    assert not (tmp_path / ".loraplex").exists()
