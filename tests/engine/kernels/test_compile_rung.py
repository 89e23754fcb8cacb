"""Every Triton kernel compiled for sm_90 as the engine launches it: no spills, wide loads, the intended tensor cores."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.engine.interpreter_runs import SIDE_BY_SIDE

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KERNELS = re.compile(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+_kernel)\(")


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of the variants that each change is tested with; with `--long` of every one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    options = ["--processes", "1"] if SIDE_BY_SIDE else []
    options += ["--every"] if request.config.getoption("--long") else []
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.compile_rung", "--json", *options],
        check=False,
        env=os.environ | {"PYTHONPATH": ".src"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_variant_is_as_demanded(lines: list[dict[str, Any]]) -> None:
    wrong = [f"{line['variant']}, {line['kernel']}: {line['failures']}" for line in lines if line["failures"]]
    assert not wrong, "\n".join(wrong)


def test_known_spills_are_exact(lines: list[dict[str, Any]]) -> None:
    """Under another Triton than those that were tried, no kernel may spill."""
    from tests.engine.kernels.compile_demands import KNOWN_SPILLS, Demand, Spills
    from tests.engine.kernels.compile_rung import memory_failures

    found = [line for line in lines if line["stack"] or line["local"]]
    known = {spills for (version, _), spills in KNOWN_SPILLS.items() if version == triton.__version__}
    assert {Spills(line["stack"], line["local"]) for line in found} == known
    for line in found:
        stack, accesses = line["stack"], line["local"]
        assert not [*memory_failures(Demand(spills=Spills(stack, accesses)), line)]
        for less in (Spills(stack - 1, accesses), Spills(stack, accesses - 1), Spills()):
            (failure,) = memory_failures(Demand(spills=less), line)
            assert f"{stack} bytes of stack instead of at most {less.stack}" in failure
        assert [*memory_failures(Demand(spills=Spills(stack, accesses)), line | {"loop_local": 1})]


def test_no_kernel_is_left_out(lines: list[dict[str, Any]]) -> None:
    sources = (ROOT / "engine" / "kernels").rglob("*.py")
    written = {name for source in sources for name in KERNELS.findall(source.read_text())}
    assert len(written) >= 8
    assert {line["kernel"] for line in lines} == written


def test_a_number_of_rows_compiles_nothing_new(lines: list[dict[str, Any]]) -> None:
    """A server that meets every batch size must not stop for the compiler."""
    few = {
        line["registers"]
        for line in lines
        if re.match(r"gemm/int4/m(1|16)-n4096-k4096/bfloat16", line["variant"])
    }
    assert len(few) == 1
