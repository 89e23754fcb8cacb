"""The guards hold in an interpreter that drops every `assert` (`python -O`): the tests of attacks pass there, too.

pytest rewrites the asserts of test files to statements that stay. What would hide a failure is shown by a test that must fail.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

from loraplex.platform.processes.child_process import python_command

ROOT: Final = Path(__file__).parents[2]
GUARDS: Final = (
    "tests/adapters/validation/test_safetensors_header.py",
    "tests/adapters/validation/test_peft_config.py",
    "tests/adapters/storage/test_local_store.py",
    "tests/engine/checkpoints/test_model_files.py",
    "tests/platform/parameters/test_json_object.py",
    "tests/platform/parameters/test_parameter_table.py",
    "tests/platform/auth/test_client_address.py",
    "tests/platform/test_config.py",
)
"""Files whose tests are quick, need no fixture of a conftest, and refuse what an attacker sends."""
SLOW: Final = ("any_json", "any_bytes", "canonical_form")
"""Hypothesis looks for another kind of error than a guard that is gone."""
FAILS: Final = """
def test_debug_is_off():
    if __debug__:
        raise RuntimeError("asserts are not dropped")

def test_that_must_fail():
    assert 1 == 2
"""


def optimized(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run pytest without asserts in this process and its children."""
    plugins = ("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "xdist.plugin")
    command = python_command("-m", "pytest", "-q", "--noconftest", *plugins, *arguments)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Other plugins and the conftests take longer to import, and to compile once more, than these tests take.
    environment |= {"PYTHONOPTIMIZE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_s04_a_failing_test_fails_without_asserts(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(FAILS)
    ended = optimized(str(file), f"--rootdir={tmp_path}", "-c", os.devnull)
    assert ended.returncode == 1 and "1 failed, 1 passed" in ended.stdout, ended.stdout


def test_s04_guards_hold_without_asserts() -> None:
    ended = optimized(*GUARDS, "-k", f"not ({' or '.join(SLOW)})")
    assert ended.returncode == 0, ended.stdout[-4000:]
