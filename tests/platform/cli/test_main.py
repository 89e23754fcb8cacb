"""The command line: quick help without torch, clear errors, exit codes."""

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from transformers import LlamaConfig
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
    mistyped = loraplex("adaptor", folder=tmp_path)
    assert mistyped.returncode == 2 and "Did you mean 'adapter'" in mistyped.stderr
    of_group = loraplex("key", "rotat", folder=tmp_path)
    assert of_group.returncode == 2 and "Did you mean 'rotate'" in of_group.stderr
    option = loraplex("serve", "--modl", "red", folder=tmp_path)
    assert option.returncode == 2 and "--model" in option.stderr


def test_completion_is_installed_at_the_root_alone_and_imports_no_command() -> None:
    runner = CliRunner()
    assert "--install-completion" in runner.invoke(main, ["--help"]).stdout
    assert "completion" not in runner.invoke(main, ["key", "--help"]).stdout
    words = {"_LORAPLEX_COMPLETE": "complete_bash", "COMP_WORDS": "loraplex re", "COMP_CWORD": "1"}
    code = (
        "import sys\nfrom loraplex.platform.cli.main import main\n"
        "try: main(prog_name='loraplex')\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["restore", "release", "False"]


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
        (["--model", "/nonexistent"], ["model", "/nonexistent", "hub id"]),
        (["--model", "n" * 300], ["model", "nnn", "too long"]),
        (["--model", "file.txt"], ["model", "file.txt", ".gguf"]),
        (["--model", "broken.gguf"], ["model", "GGUF"]),
        (["--model", "folder"], ["model", "folder/config.json", "No such file"]),
        (["--model", "configured"], ["model", "configured", "model.safetensors"]),
        (
            ["--role", "engine", "--engine", "ipc:///tmp/e", "--model", "folder"],
            ["model", "folder/config.json"],
        ),
    ],
)
def test_wrong_settings_exit_2_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_what_is_no_model(tmp_path)
    done = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert done.exit_code == 2, done.stderr
    assert gc.isenabled(), "a caller in this process goes on"
    assert not (tmp_path / ".loraplex").exists()
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_model_that_the_hub_does_not_have_ends_the_engine_without_a_traceback(tmp_path: Path) -> None:
    role = ("--role", "engine", "--engine", f"ipc://{tmp_path}/run/e.sock")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path / "cache"))
        done = loraplex("serve", *role, "--model", "nobody/nothing", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "model 'nobody/nothing'" in done.stderr and "from the hub" in done.stderr
    assert "Traceback" not in done.stderr


def make_what_is_no_model(folder: Path) -> None:
    for name in ("file.txt", "broken.gguf"):
        (folder / name).write_text("no model")
    (folder / "folder").mkdir()
    (folder / "configured").mkdir()
    (folder / "configured" / "config.json").write_text(
        json.dumps(LlamaConfig(architectures=["LlamaForCausalLM"]).to_dict())
    )


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = loraplex("serve", "--demo", "--port", str(port), folder=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr and "taken" in done.stderr
    assert not (tmp_path / ".loraplex").exists()
