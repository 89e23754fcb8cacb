"""The whole command without a GPU: every stage, every operation, tiny; what it writes and what it prints."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Lines and standard output."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the run chooses for itself what is interpreted")
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--dry", "--budget", "400", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": ".src", "TRITON_CACHE_DIR": str(folder / "triton")}
    ended = subprocess.run(
        command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-4000:]
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()], ended.stdout


def test_every_stage_and_operation_has_lines(done: tuple[list[dict[str, Any]], str]) -> None:
    lines, _ = done
    kernels = {"lora pair", "gemm", "attention decode", "attention prefill", "rms norm", "bitmask"}
    kernels |= {"rotary and KV write", "silu mul", "lora embedding", "cutoff"}
    for stage in ("check", "time"):
        assert kernels <= {line["op"] for line in lines if line["stage"] == stage}
    assert {line["op"] for line in lines if line["stage"] == "build"} >= {"lora pair", "gemm", "bitmask"}
    assert "probe/copy, read and written" in {line["case"] for line in lines}
    cases = {line["case"] for line in lines if line["stage"] == "time"}
    assert {"swap/ms", "zipf/rate over resident", "peft/rate over peft"} <= cases
    assert {"tpot/tiny/int4/b2/base", "over base/tiny/int4/b2/distinct"} <= cases


def test_every_line_is_dry_and_whole(done: tuple[list[dict[str, Any]], str]) -> None:
    lines, _ = done
    for line in lines:
        assert line["dry"] is True and line["ok"] is not False, line
        assert {"hardware", "versions", "commit", "driver", "at", "error"} <= set(line)
    checked = [line for line in lines if line["stage"] == "check" and line["ok"]]
    assert all(line["nan"] == line["unwritten"] == 0 and line["rel_err"] < 1e-2 for line in checked)
    built = [line for line in lines if line["stage"] == "build"]
    assert all(line["stack"] == 0 and line["regs"] > 0 and line["compile_s"] is not None for line in built)
    timed = next(line for line in lines if line["stage"] == "time" and line["op"] == "lora pair")
    assert timed["regs"] == max(line["regs"] for line in built if line["case"] == timed["case"])
    assert timed["us_p10"] <= timed["us_p50"] <= timed["us_p90"]


def test_the_table_is_short_and_leaves_every_demand_open(done: tuple[list[dict[str, Any]], str]) -> None:
    _, output = done
    table = output.splitlines()
    assert len(table) <= 61
    assert sum(line.startswith("open ") for line in table) == 31
    assert not any(line.startswith(("ok ", "MISS")) for line in table)
