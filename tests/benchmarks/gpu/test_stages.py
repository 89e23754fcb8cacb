"""Stages whose own work raises: each costs itself alone."""

import time
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.children import forking_context
from tests.benchmarks.gpu.record import Recorder
from tests.benchmarks.gpu.stages import STAGES, Choice, Run


def test_a_stage_that_raises_costs_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def raises(self: Run, *arguments: Any, **named: Any) -> None:
        raise ModuleNotFoundError("No module named 'pytest'", name="pytest")

    for name in ("_follow", "_build", "_check_and_time", "_tests", "_models", "_sweeps", "_peers"):
        monkeypatch.setattr(Run, name, raises)
    recorder = Recorder(tmp_path, is_dry=True, driver=None)
    choice = Choice(STAGES, (), (), tmp_path)
    Run(choice, True, time.monotonic() + 60, recorder, forking_context(is_dry=True)).all_stages()
    failed = [line["case"] for line in recorder.lines if line["ok"] is False]
    assert ", ".join(failed).split(", ") == [*STAGES]
    errors = [line["error"].partition(" at ")[0] for line in recorder.lines[:-1]]
    assert {*errors} == {"failed: ModuleNotFoundError"}
    assert recorder.lines[-1]["case"] == "restarts"


def test_products_that_torch_computes_are_not_built() -> None:
    """Their operands are quantized when they are drawn, and what is built has none."""
    compiled = {case.name for case in kernel_cases(is_dry=False) if case.is_compiled}
    assert compiled and not any(name.startswith(("gemm/fp8", "gemm/torch")) for name in compiled)
    assert any(name.startswith("round rows") for name in compiled)
