"""The units: valid, hardened, and with commands, settings and times of the program."""

import configparser
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.deploy.settings_named import require_command, require_setting_variable, require_settings

from loraplex.platform.config import Settings
from loraplex.platform.startup_errors import SettingsError

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
NAMES = sorted(path.name.replace("@", "@1") for path in UNITS.glob("*.service"))
MOST_EXPOSURE = "20"
"""In tenths: 1.7 of 10 are left, most of them for sockets and machine code, which the server needs."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with the units of this machine and ours, and a program in place of loraplex."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    folder = tmp_path_factory.mktemp("root")
    shutil.copytree("/lib/systemd/system", folder / "usr" / "lib" / "systemd" / "system", symlinks=True)
    shutil.copytree(UNITS, folder / "etc" / "systemd" / "system")
    program = folder / "opt" / "loraplex" / "bin" / "loraplex"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return folder


def analyze(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["systemd-analyze", f"--root={root}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_systemd_finds_nothing_wrong(root: Path, name: str) -> None:
    result = analyze(root, "verify", "--man=no", name)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_is_exposed_to_little(root: Path, name: str) -> None:
    result = analyze(root, "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSURE}", name)
    assert result.returncode == 0, result.stdout[-2000:]


def unit(path: Path) -> dict[str, dict[str, str]]:
    """Sections of a unit; of a repeated option the last line."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(path)
    return {name: dict(parser[name]) for name in parser.sections()}


@pytest.mark.parametrize("path", sorted(UNITS.glob("*.service")), ids=lambda path: path.name)
def test_commands_are_those_of_the_program(path: Path) -> None:
    command = unit(path)["Service"]["ExecStart"].replace("%i", "1").split()
    assert command[0] == "/opt/loraplex/bin/loraplex"
    require_command(command[1:])


def test_what_all_units_share_gives_a_drain_its_time_and_survives_a_killed_worker() -> None:
    shared = unit(UNITS / "loraplex-.service.d" / "hardening.conf")["Service"]
    assert float(shared["TimeoutStopSec"]) > Settings().drain_grace_s + Settings().drain_s + 10
    assert (shared["KillMode"], shared["OOMPolicy"]) == ("mixed", "continue")
    for name in re.findall(r"(LORAPLEX_\w+)=", "".join(path.read_text() for path in UNITS.rglob("*.conf*"))):
        require_setting_variable(name)


@pytest.mark.parametrize("path", sorted(UNITS.glob("*.service")), ids=lambda path: path.name)
def test_what_serves_is_restarted_for_good(path: Path) -> None:
    options = unit(path)
    serves = " serve " in options["Service"]["ExecStart"]
    assert options["Unit"].get("StartLimitIntervalSec") == ("0" if serves else None)
    shared = unit(UNITS / "loraplex-.service.d" / "hardening.conf")["Service"]
    assert shared["RestartPreventExitStatus"] == str(SettingsError.exit_code)


def test_the_example_of_the_settings_is_valid() -> None:
    settings = tomllib.loads((UNITS / "loraplex.toml.example").read_text())
    require_settings(settings)
    # The console answers by this name alone.
    site = (UNITS.parent / "nginx" / "loraplex.conf").read_text()
    assert f"server_name {urlsplit(settings['public_url']).hostname};" in site


def test_an_instance_of_the_engine_has_the_gpu_and_the_socket_of_its_number() -> None:
    engine = unit(UNITS / "loraplex-engine@.service")["Service"]
    assert engine["Environment"] == "CUDA_VISIBLE_DEVICES=%i"
    socket = engine["ExecStart"].rpartition(" ")[2]
    gateway = unit(UNITS / "loraplex-gateway@.service")["Service"]["ExecStart"].split()
    pattern = gateway[gateway.index("--engine") + 1]
    single = unit(UNITS / "loraplex-engine.service")["Service"]["ExecStart"].rpartition(" ")[2]
    assert fnmatch(socket.replace("%i", "3"), pattern) and fnmatch(single, pattern)
    # What was drained stays ended.
    shared = unit(UNITS / "loraplex-.service.d" / "hardening.conf")["Service"]
    assert shared["Restart"] == "on-failure"
