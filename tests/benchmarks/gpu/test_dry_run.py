"""The whole command without a GPU: every stage, tiny; what it writes and what it prints. With `--long` every case and job."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu.stages import DRY_TESTS
from tests.benchmarks.gpu.targets import targets

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
FEW = "probe,rms norm,torch sdpa,humming,swap,graphs,DECODE_STAGES,test_cuda_pool"
KERNELS = {
    *("lora pair", "gemm", "attention decode", "attention prefill", "rms norm", "bitmask"),
    *("rotary and KV write", "silu mul", "lora embedding", "cutoff"),
}
Done = tuple[list[dict[str, Any]], str]


def run(folder: Path, *options: str) -> Done:
    """Lines and standard output of a run that failed nowhere."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the run chooses for itself what is interpreted")
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "rest", "--dry", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": ".src", "TRITON_CACHE_DIR": str(folder / "triton")}
    ended = subprocess.run(
        [*command, *options],
        check=False,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-4000:]
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()], ended.stdout


@pytest.fixture(scope="module", params=["a few cases", pytest.param("all", marks=pytest.mark.long)])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of the plan that has every stage."""
    options = [] if request.param == "all" else ["--only", FEW]
    return run(tmp_path_factory.mktemp("gpu"), *options)


def test_every_line_is_dry_and_whole(done: Done) -> None:
    lines, _ = done
    for line in lines:
        assert line["dry"] is True and line["ok"] is not False, line
        if line["stage"] == "end":
            assert line["final"] and line["work"] and line["unit"] == "s"
            continue
        assert line["ok"] or line["error"].startswith(("not run: ", "not installed: ")), line
        assert {"hardware", "versions", "commit", "driver", "at"} <= set(line)
    checked = [line for line in lines if line["stage"] == "check" and line["ok"]]
    assert checked and all(
        line["nan"] == line["unwritten"] == 0 and line["rel_err"] < 1e-2 for line in checked
    )
    built = [line for line in lines if line["stage"] == "build"]
    assert built
    assert all(line["stack"] == 0 and line["regs"] > 0 and line["compile_s"] is not None for line in built)
    timed = next(line for line in lines if line["stage"] == "time" and line["op"] == "rms norm")
    assert timed["regs"] == max(line["regs"] for line in built if line["case"] == timed["case"])
    assert timed["us_p10"] <= timed["us_p50"] <= timed["us_p90"]


def test_every_stage_has_lines(done: Done) -> None:
    lines, _ = done
    cases = {line["case"] for line in lines if line["stage"] == "time"}
    assert {"swap/ms", "graphs/equal tokens"} <= cases
    assert any(case.endswith("DECODE_STAGES 3") for case in cases)
    assert any("torch sdpa" in case for case in cases)
    assert "probe/copy, read and written" in {line["case"] for line in lines}
    tests = [line for line in lines if line["stage"] == "tests"]
    assert 1 <= len(tests) <= DRY_TESTS
    assert all(line["error"] == "not run: Skipped: no CUDA device" for line in tests)
    peer = next(line for line in lines if "humming" in line["case"])
    assert peer["ok"] is None
    assert lines[-1]["case"] == "restarts" and lines[-1]["value"] == 0


def test_the_report_leaves_every_target_open(done: Done) -> None:
    _, output = done
    whole = output.splitlines()
    # Before it, each case has a line when it ends.
    texts = whole[whole.index("dry") :]
    begin = texts.index(f"targets: {len(targets()) + 1}") + 1
    rows = texts[begin : begin + len(targets()) + 1]
    assert all(row.startswith("not run") for row in rows) and len(texts) < 170


@pytest.mark.long
def test_every_operation_and_job_has_lines(tmp_path: Path) -> None:
    lines, _ = run(tmp_path)
    for stage in ("check", "time"):
        assert KERNELS <= {line["op"] for line in lines if line["stage"] == stage}
    assert {line["op"] for line in lines if line["stage"] == "build"} >= {"lora pair", "gemm", "bitmask"}
    cases = {line["case"] for line in lines if line["stage"] == "time" and line["ok"]}
    for case in (
        *("zipf/rate over resident", "peft/rate over peft", "mixed/rate over decode", "json/rate over free"),
        *("steps/masks over greedy", "steps/forced tokens over greedy", "logits/error over transformers"),
        *("tpot/tiny/int4/b2/base", "over base/tiny/int4/b2/distinct", "over base/tiny/int4/b2/zipf 8-bit"),
    ):
        assert case in cases
    assert any(case.startswith("profile/int4, 2 adapters/") for case in cases)
