"""Plans and their stages: what a stage costs when its work raises or hangs, and what is left out because it is done."""

import os
import time
from collections.abc import Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu import stages
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.children import forking_context
from tests.benchmarks.gpu.machine import Machine, unknown
from tests.benchmarks.gpu.outputs import Outputs
from tests.benchmarks.gpu.plans import PLANS, Stage, caps_of_jobs, plan_of
from tests.benchmarks.gpu.record import Recorder
from tests.benchmarks.gpu.stages import Choice, Run
from tests.benchmarks.gpu.worker import Results, buildable

HEAD: dict[str, Any] = {
    "run": "r",
    "hardware": {"gpu": None},
    "versions": {},
    "driver": None,
    "cache": "c",
    "commit": None,
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def run(folder: Path, plan: Sequence[Stage], done: Sequence[str] = (), *, is_dry: bool = True) -> Run:
    began = time.monotonic()
    recorder = Recorder(folder, HEAD, is_dry=is_dry)
    context = forking_context(is_dry=False)
    made = Run(Choice(plan), {*done}, is_dry, began, began + 300.0, recorder, context, Outputs(folder))
    made.all_stages()
    return made


def hangs_in_a_kernel(connection: Connection, is_dry: bool, stage: str, names: Sequence[str]) -> None:
    results = Results(connection)
    for name in names:
        results.begin(name)
        if stage == "time" and name.startswith("lora"):
            time.sleep(600)
        results.line({"stage": stage, "case": name, "ok": True})


def test_a_stage_that_hangs_costs_its_seconds_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "run_kernels", hangs_in_a_kernel)
    # The first one has the server's start.
    plan = [Stage("check", "check", 60.0), Stage("time", "time", 4.0), Stage("peers", "peers", 60.0)]
    lines = run(tmp_path, plan, is_dry=False).recorder.lines
    cases = [case for case in kernel_cases(is_dry=False) if case.tier == 1 or case.operation == "peers"]
    tier = [case.name for case in cases if case.operation != "peers"]
    assert [line["case"] for line in lines if line["stage"] == "check"] == tier
    missed = [line for line in lines if (line["work"] or "").startswith("time/") and not line["ok"]]
    assert [line["case"] for line in missed] == tier
    # One or two cases by 0.4 of the stage's seconds, depending on how long processes take to start.
    assert {line["error"] for line in missed if line["final"]} == {"killed: it took longer than its 2 s"}
    assert 0 < sum(bool(line["final"]) for line in missed) <= 2
    assert {line["error"] for line in missed if not line["final"]} == {"not run: its stage's time was over"}
    assert [line["case"] for line in lines if line["stage"] == "time"] == [
        case.name for case in cases if case.operation == "peers"
    ]
    behind = next(line for line in lines if line["case"] == tier[-1] and line["stage"] == "run")
    seconds = datetime.fromisoformat(behind["at"]) - datetime.fromisoformat(lines[0]["at"])
    assert seconds.total_seconds() <= 4.0 + 1.0, "they are whole seconds"


def test_a_stage_that_raises_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises(self: Run, *arguments: Any, **named: Any) -> None:
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")

    for name in ("_follow", "_tests", "_job", "_sweeps"):
        monkeypatch.setattr(Run, name, raises)
    plan = plan_of("rest", {})
    lines = run(tmp_path, plan).recorder.lines
    assert [line["case"] for line in lines if line["ok"] is False] == [stage.name for stage in plan]
    errors = [line["error"].partition(" at ")[0] for line in lines[:-1]]
    assert {*errors} == {"failed: ModuleNotFoundError"}
    assert lines[-1]["case"] == "restarts"


def test_what_is_done_is_left_out(tmp_path: Path) -> None:
    cases = [case.name for case in kernel_cases(is_dry=True)]
    done = [f"{kind}/{name}" for name in cases[1:] for kind in ("check", "time")]
    lines = run(tmp_path, [Stage("check", "check", 60.0)], done).recorder.lines
    assert {line["work"] for line in lines} == {f"check/{cases[0]}", None}
    assert {*cases[:2]} < {*buildable(is_dry=True)}
    made = run(tmp_path, (), done)
    assert [name for name in made._built_cases() if name in cases] == cases[:1]


def test_plans_fit_their_commands(tmp_path: Path) -> None:
    """Ten minutes, of which the start of Python and the report take some seconds; then what is left of fifteen."""
    plans = {name: plan_of(name, caps_of_jobs(tmp_path)) for name in PLANS}
    sums = {name: sum(stage.seconds for stage in plan) for name, plan in plans.items()}
    assert sums["first"] <= 535 and sums["second"] <= 170
    names = [stage.name for stage in plans["rest"]]
    assert len({*names}) == len(names)
    assert names[: len(plans["first"])] == [stage.name for stage in plans["first"]]
    assert {*caps_of_jobs(tmp_path)} < {*names} and names[-1] == "all tests"
    assert all(stage.seconds > 0 for plan in plans.values() for stage in plan)


def test_products_that_torch_computes_are_not_built() -> None:
    """Their operands are quantized when they are drawn, and what is built has none."""
    compiled = {case.name for case in kernel_cases(is_dry=False) if case.is_compiled}
    assert compiled and not any(name.startswith(("gemm/fp8", "gemm/torch")) for name in compiled)
    assert any(name.startswith("round rows") for name in compiled)


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 20\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    began = time.monotonic()
    assert Machine(is_dry=True).head(1.0) is None
    assert time.monotonic() - began < 2.0


def test_a_machine_names_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    head, later = (Machine(is_dry=True).head(60.0) for _ in range(2))
    assert head is not None and head.keys() == unknown().keys() and head["cache"]
    assert later is not None and later["cache"] == head["cache"]
