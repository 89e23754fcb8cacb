"""A command finds the gateways that run on a data directory, and none that has ended, however it ended."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from loraplex.platform.processes.child_process import python_command
from loraplex.platform.server.gateway_address import FOLDER, GatewayAddress, announced, running_gateways

HERE: Final = GatewayAddress("http://127.0.0.1:1", "https://llm.example.com")
THERE: Final = GatewayAddress("http://127.0.0.1:2", None)
GATEWAY: Final = """
import sys
from pathlib import Path
from loraplex.platform.server.gateway_address import GatewayAddress, announced
with announced(Path(sys.argv[1]), GatewayAddress("http://127.0.0.1:2", None)):
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_gateway(data_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that announces `THERE`, until its standard input ends."""
    command = python_command("-c", GATEWAY, str(data_dir))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_gateways_are_found_while_they_run(tmp_path: Path) -> None:
    assert running_gateways(tmp_path) == [] and list(tmp_path.iterdir()) == []
    with announced(tmp_path, HERE), other_gateway(tmp_path) as other:
        found = running_gateways(tmp_path)
        assert len(found) == 2 and HERE in found and THERE in found
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / FOLDER).iterdir()} == {0o600}
        other.communicate()
        assert running_gateways(tmp_path) == [HERE]
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_killed_gateway_is_not_found_and_its_file_is_removed(tmp_path: Path) -> None:
    with other_gateway(tmp_path) as other:
        other.kill()
        other.wait()
        (left,) = (tmp_path / FOLDER).iterdir()
        assert running_gateways(tmp_path) == [] and not left.exists()
    with other_gateway(tmp_path) as other:
        other.kill()
        other.wait()
    with announced(tmp_path, HERE):
        assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_file_is_found_by_its_lock_and_not_by_a_process_id_of_its_owner(tmp_path: Path) -> None:
    with announced(tmp_path, HERE):
        (file,) = (tmp_path / FOLDER).iterdir()
        copied = file.with_name("copied.json")
        copied.write_bytes(file.read_bytes())
        assert running_gateways(tmp_path) == [HERE] and not copied.exists()


def test_a_file_of_another_user_hides_no_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may remove any file, and tests may run as root."""

    def not_permitted(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    with announced(tmp_path, HERE):
        (file,) = (tmp_path / FOLDER).iterdir()
        ended = [file.with_name(f"{name}.json") for name in ("a", "z")]
        for each in ended:
            each.write_bytes(file.read_bytes())
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", not_permitted)
            patch.setattr(Path, "glob", lambda *_: iter([ended[0], file, ended[1]]))
            assert running_gateways(tmp_path) == [HERE]
