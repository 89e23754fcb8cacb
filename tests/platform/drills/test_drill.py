"""A drill takes its fault back however it ends, and its report breaks the promises that it finds broken."""

import asyncio
from pathlib import Path

import pytest

from loraplex.platform.config import load_settings
from loraplex.platform.drills import drill
from loraplex.platform.drills.drill import _inject_fault, _of_ledger, _recover, _undone, _warm_up
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.disk_full import DiskFull
from loraplex.platform.drills.installation import Installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.traffic import CONNECTION_LOST, RequestOutcome, Traffic
from loraplex.platform.drills.undo import RemoveFile, Undo
from loraplex.platform.drills.watchdog import DrillWatchdog
from loraplex.platform.processes.progress import SILENT


class Noted(DrillWatchdog):
    """Notes what a watchdog would have to do."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.left: dict[int, Undo] = {}

    def add(self, undo: Undo) -> int:
        self.left[len(self.left)] = undo
        return len(self.left) - 1

    def drop(self, number: int) -> None:
        del self.left[number]


def filling(tmp_path: Path, seconds: float) -> DiskFull:
    installation = Installation(load_settings({"data_dir": tmp_path}), "", "", ())
    return DiskFull(
        installation=installation, seconds=seconds, max_ballast_bytes=1 << 16, ballast=tmp_path / "ballast"
    )


REFUSED = Traffic(["http://127.0.0.1:1"], "key", "model", 1.0, 1)
REFUSED.outcomes.append(RequestOutcome("r", 0.0, 1.0, 507, "storage_full", False, None, 0))


async def test_the_fault_is_taken_back_at_its_end(tmp_path: Path) -> None:
    watchdog, fault = Noted(), filling(tmp_path, 0.05)
    began_s, ended_s = await _inject_fault(fault, watchdog, REFUSED, SILENT)
    assert ended_s - began_s >= 0.05
    assert not fault.ballast.exists() and not watchdog.left


async def test_the_fault_is_taken_back_when_the_drill_is_stopped(tmp_path: Path) -> None:
    watchdog, fault = Noted(), filling(tmp_path, 600.0)
    drilling = asyncio.create_task(_inject_fault(fault, watchdog, REFUSED, SILENT))
    async with asyncio.timeout(60):
        while not fault.ballast.exists():
            await asyncio.sleep(0.01)
    assert watchdog.left == {0: RemoveFile(str(fault.ballast))}
    drilling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drilling
    assert not fault.ballast.exists() and not watchdog.left


async def test_a_fault_lasts_until_a_request_has_met_it(tmp_path: Path) -> None:
    watchdog, fault, traffic = Noted(), filling(tmp_path, 0.0), traffic_of()
    drilling = asyncio.create_task(_inject_fault(fault, watchdog, traffic, SILENT))
    await asyncio.sleep(0.3)
    assert not drilling.done()
    traffic.outcomes += REFUSED.outcomes
    await drilling
    assert not fault.ballast.exists()


async def test_a_fault_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    watchdog, fault = Noted(), filling(tmp_path, 1.0)
    fault.ballast = tmp_path / "none" / "ballast"
    with pytest.raises(DrillImpossible, match="could not be made"):
        await _inject_fault(fault, watchdog, REFUSED, SILENT)
    assert not watchdog.left


async def test_what_cannot_be_taken_back_is_left_to_the_watchdog(tmp_path: Path) -> None:
    watchdog, folder = Noted(), RemoveFile(str(tmp_path))
    with pytest.raises(DrillImpossible, match="watchdog goes on"):
        async with _undone(folder, watchdog):
            assert watchdog.left
    assert watchdog.left == {0: folder}


def outcome(started_s: float, ended_s: float, complete: bool = True) -> RequestOutcome:
    return RequestOutcome(
        "r", started_s, ended_s, 200, None if complete else CONNECTION_LOST, complete, None, 0
    )


def traffic_of(*outcomes: RequestOutcome) -> Traffic:
    found = Traffic(["http://127.0.0.1:1"], "key", "model", 1.0, 1)
    found.outcomes += outcomes
    return found


async def test_no_fault_without_service_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DrillImpossible, match=CONNECTION_LOST):
        await _warm_up(traffic_of(outcome(0, 1, complete=False)))
    monkeypatch.setattr(drill, "WARM_UP_S", 0.0)
    with pytest.raises(DrillImpossible, match="too few"):
        await _warm_up(traffic_of(outcome(0, 1)))
    await _warm_up(traffic_of(*[outcome(0, 1)] * drill.WARM_UP))


@pytest.mark.parametrize(
    ("outcomes", "waits"),
    [
        ([outcome(11, 12)], False),
        ([outcome(9, 12)], True),
        ([outcome(11, 12), outcome(12, 19.5, complete=False)], True),
        ([], True),
    ],
    ids=["served", "begun before", "an error a moment ago", "nothing"],
)
async def test_recovery_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[RequestOutcome], waits: bool
) -> None:
    now = 20.0
    waited = 0

    async def sleep(seconds: float) -> None:
        nonlocal now, waited
        waited += 1
        now += 100.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    monkeypatch.setattr(drill, "time", Clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await _recover(traffic_of(*outcomes), 10.0, 60.0)
    assert bool(waited) == waits


@pytest.mark.parametrize(
    ("drift", "broken"),
    [
        (LedgerDrift(), []),
        (LedgerDrift(drift_pico=1), [0]),
        (LedgerDrift(drift_tokens=1), [0]),
        (LedgerDrift(missing=1), [1]),
        (LedgerDrift(duplicated=1), [1]),
        (LedgerDrift(unexpected=1), [1]),
        (LedgerDrift(open=1), [1]),
        (LedgerDrift(unbilled_tokens=1), [2]),
        (None, [0]),
    ],
)
def test_each_difference_breaks_its_promise(drift: LedgerDrift | None, broken: list[int]) -> None:
    promises = _of_ledger(drift, charges_all=True)
    assert [number for number, promise in enumerate(promises) if not promise.kept] == broken
    assert all(promise.kept for promise in _of_ledger(LedgerDrift(unbilled_tokens=1), charges_all=False))
