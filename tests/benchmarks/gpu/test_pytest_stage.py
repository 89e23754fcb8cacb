"""GPU tests need a few packages; neither the suite's servers nor its plugins."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.benchmarks.gpu.pytest_stage import FILES, OPTIONS, ROOT
from tests.benchmarks.gpu.wheels import PRESENT, RUNNER, TESTS, closure, link

pytest.importorskip("triton")

OWN_MARK = "pytest.mark." + "gpu"
DEVICE = re.compile(r"\bdevice: torch\.device|\bkernel_dtype\b")


def test_every_file_with_gpu_tests_is_run() -> None:
    """A test is marked itself, or by the fixture of a device in `tests/engine/kernels`."""
    found = {path for path in (ROOT / "tests").rglob("test_*.py") if OWN_MARK in path.read_text()}
    kernels = (ROOT / "tests/engine/kernels/triton").glob("test_*.py")
    found |= {path for path in kernels if DEVICE.search(path.read_text())}
    assert found <= {ROOT / name for name in FILES}


def test_they_are_collected_where_only_those_packages_exist(tmp_path: Path) -> None:
    """Without `site`, Python finds the linked packages and the standard library."""
    link(TESTS, tmp_path)
    command = [sys.executable, "-S", "-m", "pytest", *OPTIONS, "--collect-only", "-q", *FILES]
    ended = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), ".src", "."))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = re.search(r"(\d+)/\d+ tests collected", ended.stdout)
    assert found and int(found[1]) > 700
    assert all(name in ended.stdout for name in FILES)
    installed = {path.name for path in tmp_path.iterdir()}
    assert "torch" in installed
    assert not installed & {
        "boto3",
        "moto",
        "psycopg",
        "redis",
        "pytest_asyncio",
        "pydantic",
        "httpx",
        "hypothesis",
    }


def test_little_travels_to_a_machine_with_torch_and_transformers() -> None:
    assert set(closure(RUNNER, PRESENT)) == {"msgspec", "structlog", "cachetools"}
    assert {"torch", "jinja2", "numpy"} <= set(closure(["torch", "transformers"]))
