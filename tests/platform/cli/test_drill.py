"""`loraplex drill` does nothing that was not confirmed, and its exit code says what it found."""

import json
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli import drill
from loraplex.platform.config import load_settings
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault
from loraplex.platform.drills.installation import Installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.report import DrillReport, Promise
from loraplex.tenants.errors import NameTaken

RAN: list[Fault] = []


def command(*arguments: str, answer: str | None = None) -> Result:
    RAN.clear()
    return CliRunner().invoke(drill.app, [*arguments], input=answer)


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that is found, with one free gibibyte at most, and a drill that only notes its fault."""

    async def find(*_: Any) -> Installation:
        return Installation(load_settings({"data_dir": tmp_path}), "", "", ("http://127.0.0.1:1",))

    async def run(fault: Fault, *_: Any) -> DrillReport:
        RAN.append(fault)
        return report(Promise("kept", True, "0"))

    monkeypatch.setattr(drill, "find_installation", find)
    monkeypatch.setattr(drill, "run_drill", run)


def report(*promises: Promise) -> DrillReport:
    return DrillReport(
        fault="disk-full",
        fault_s=1.0,
        requests=3,
        completed=3,
        recovery_s=0.5,
        drift=LedgerDrift(),
        promises=list(promises),
    )


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    async def run(*_: Any) -> DrillReport:
        raise error

    monkeypatch.setattr(drill, "run_drill", run)


FILL = ("disk-full", "--max-ballast", "10000")


def test_a_confirmed_drill_runs_and_says_before_what_it_does(tmp_path: Path) -> None:
    result = command(*FILL, "--yes", "--json")
    assert result.exit_code == 0 and len(RAN) == 1
    assert "drill disk-full: this will take all" in result.stderr and str(tmp_path) in result.stderr
    assert json.loads(result.stdout)["survived"] is True


def test_without_a_terminal_it_must_be_confirmed_beforehand() -> None:
    result = command(*FILL)
    assert (result.exit_code, RAN) == (2, []) and "--yes" in result.stderr


@pytest.mark.parametrize(("answer", "exit_code"), [("n\n", 2), ("y\n", 0)])
def test_on_a_terminal_it_asks(monkeypatch: pytest.MonkeyPatch, answer: str, exit_code: int) -> None:
    monkeypatch.setattr(drill, "is_terminal", lambda: True)
    result = command(*FILL, answer=answer)
    assert (result.exit_code, len(RAN)) == (exit_code, 0 if exit_code else 1)


def test_what_cannot_be_done_is_found_before_it_asks() -> None:
    for name in ("engine-kill", "engine-hang", "gateway-kill", "redis-flush"):
        result = command(name, "--yes")
        assert (result.exit_code, RAN) == (2, []), result.output
        assert "this will" not in result.stderr


def test_a_broken_promise_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> DrillReport:
        return report(Promise("drift 0", False, "5 pico-units"))

    monkeypatch.setattr(drill, "run_drill", run)
    result = command(*FILL, "--yes")
    assert result.exit_code == 1 and "5 pico-units" in result.stdout


@pytest.mark.parametrize(
    "error", [DrillImpossible("not served"), NameTaken("it exists"), KeyboardInterrupt(), CancelledError()]
)
def test_a_drill_that_found_nothing_out_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    raising(monkeypatch, error)
    result = command(*FILL, "--yes")
    assert result.exit_code == 2 and str(error) in result.stderr
