"""What a drill of two tiers at twice the capacity finds kept and broken, and the rates that it offers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from uuid import UUID

import pytest

from loraplex.platform.config import load_settings
from loraplex.platform.drills import drill
from loraplex.platform.drills.drill_tenant import DrillTenant
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults import overload
from loraplex.platform.drills.faults.fault import Observed
from loraplex.platform.drills.faults.overload import CAPACITY_S, LEAD_S, MIN_SAMPLES, SHIPPED_S, Overload
from loraplex.platform.drills.installation import Installation
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.traffic import CLIENT_TIMEOUT, TIMEOUT_S, DrillLoad, RequestOutcome, Traffic

PHASE_S, BEGAN_S, OVER_S = 10.0, 100.0, 110.0
TENANTS = [DrillTenant(UUID(int=1), "higher"), DrillTenant(UUID(int=2), "lower")]


def fault_of(tmp_path: Path, **settings: int) -> Overload:
    found = load_settings({"data_dir": tmp_path, **settings})
    installation = Installation(found, "postgresql://x/y", "", ("http://x",))
    return Overload(installation=installation, seconds=Overload.seconds_of(PHASE_S), _tenants=TENANTS)


def answered(started_s: float, first_token_s: float | None = None) -> RequestOutcome:
    return RequestOutcome("r", started_s, started_s + 1, 200, None, True, None, 1, first_token_s)


def refused(status: int = 429, retry_after: str | None = "1") -> RequestOutcome:
    return RequestOutcome("r", OVER_S, OVER_S, status, "refused", False, None, 0, None, retry_after)


TIMED_OUT = RequestOutcome("r", OVER_S, OVER_S + 120, 200, CLIENT_TIMEOUT, False, None, 3)
# Its code is that of a refusal, too.
BROKEN_OFF = RequestOutcome("r", OVER_S, OVER_S + 1, 200, "refused", False, None, 3)
GOOD = [answered(OVER_S), refused(), refused(503)]
SLOW = "the higher tier's p95 TTFT is at most 1.2 x of alone"


@pytest.mark.parametrize(
    ("rows", "said"),
    [(16, "these fill the 16 of the engine"), (17, "these do not fill the 17 of the engine")],
)
def test_the_plan_says_what_refuses(tmp_path: Path, rows: int, said: str) -> None:
    plan = fault_of(tmp_path, max_num_seqs=rows).plan()
    assert "limit of 16 sequences at once refuses" in plan and said in plan


@pytest.mark.parametrize(
    ("beside_s", "lower", "drift", "broken"),
    [
        (0.119, GOOD, LedgerDrift(), []),
        (0.121, GOOD, LedgerDrift(), [SLOW]),
        (0.1, [answered(OVER_S)], LedgerDrift(), ["the lower tier gets 429 or 503 with Retry-After"]),
        (
            0.1,
            [*GOOD, refused(503, None)],
            LedgerDrift(),
            ["the lower tier gets 429 or 503 with Retry-After"],
        ),
        (0.1, [*GOOD, TIMED_OUT], LedgerDrift(), ["nothing of the lower tier is lost"]),
        (0.1, [*GOOD, BROKEN_OFF], LedgerDrift(), ["nothing of the lower tier is lost"]),
        (0.1, GOOD, LedgerDrift(drift_pico=1), ["the lower tier is charged for what it got: drift 0"]),
    ],
    ids=["kept", "slow", "never refused", "no Retry-After", "timed out", "broken off", "drift"],
)
async def test_promises(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beside_s: float,
    lower: list[RequestOutcome],
    drift: LedgerDrift,
    broken: list[str],
) -> None:
    async def measured(*_: object) -> LedgerDrift:
        return drift

    monkeypatch.setattr(overload, "measure_drift", measured)
    fault = fault_of(tmp_path)
    fault.over_s = OVER_S
    fault._traffic("model", DrillLoad(), 1.0, 1).outcomes += lower
    # What begins while the lower tier fills its places belongs to neither half.
    filling = answered(OVER_S + LEAD_S / 2, 9.0)
    alone, beside = answered(BEGAN_S + 1, 0.1), answered(OVER_S + LEAD_S + 1, beside_s)
    outcomes = [alone, filling, beside] * MIN_SAMPLES
    promises = await fault.promises(Observed(outcomes, BEGAN_S, OVER_S + LEAD_S + PHASE_S, LedgerDrift()))
    assert [promise.name for promise in promises if not promise.kept] == broken


@pytest.mark.parametrize(
    ("alone", "beside"),
    [
        (0, 0),
        (MIN_SAMPLES, 0),
        (0, MIN_SAMPLES),
        (MIN_SAMPLES - 1, MIN_SAMPLES),
        (MIN_SAMPLES, MIN_SAMPLES - 1),
    ],
)
async def test_too_few_first_tokens_keep_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: int, beside: int
) -> None:
    async def measured(*_: object) -> LedgerDrift:
        return LedgerDrift()

    monkeypatch.setattr(overload, "measure_drift", measured)
    fault = fault_of(tmp_path)
    fault.over_s = OVER_S
    fault._traffic("model", DrillLoad(), 1.0, 1).outcomes += GOOD
    outcomes = [answered(BEGAN_S, 0.1)] * alone + [answered(OVER_S + LEAD_S, 0.1)] * beside
    promises = await fault.promises(Observed(outcomes, BEGAN_S, OVER_S, LedgerDrift()))
    assert [promise.name for promise in promises if not promise.kept] == [SLOW]
    assert f"{beside} first tokens, alone {alone}" in promises[0].found


@pytest.mark.parametrize(
    ("ends", "codes", "refusal"),
    [
        ([0.1 * number for number in range(121)], [], None),
        ([], [], "not served even without overload"),
        ([0.001 * number for number in range(7000)], [], "at most 100"),
        ([3.0], ["overloaded"], "not served even without overload: {'overloaded': 1}"),
    ],
    ids=["served", "none", "too many", "errors"],
)
async def test_rates_follow_from_the_measured_capacity(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: Sequence[float],
    codes: Sequence[str],
    refusal: str | None,
) -> None:
    class Scripted(Traffic):
        async def __aenter__(self) -> Self:
            self.outcomes += [RequestOutcome("r", 0.0, end, 200, None, True, None, 1) for end in ends]
            self.outcomes += [RequestOutcome("r", 0.0, 1.0, 503, code, False, None, 0) for code in codes]
            return self

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 0.0

    async def at_once(_: float) -> None:
        return None

    monkeypatch.setattr(overload, "Traffic", Scripted)
    monkeypatch.setattr(overload, "time", Clock)
    monkeypatch.setattr(asyncio, "sleep", at_once)
    fault = fault_of(tmp_path)
    if refusal is not None:
        with pytest.raises(DrillImpossible, match=refusal):
            await fault.prepare(TENANTS, "model", DrillLoad())
        return
    load = await fault.prepare(TENANTS, "model", DrillLoad(max_tokens=7))
    assert fault.capacity == pytest.approx(10.0, rel=0.02)
    assert (load.rate_per_s, load.max_tokens, load.stream_share) == (0.4 * fault.capacity, 7, 1.0)
    assert 1 / fault._lower[-1]._interval_s == pytest.approx(1.6 * fault.capacity)


def test_the_watchdog_waits_for_all_that_the_drill_waits_for(tmp_path: Path) -> None:
    fault, load = fault_of(tmp_path), DrillLoad()
    of_all_s = drill.WARM_UP_S + load.recover_s + TIMEOUT_S + drill.SHIPPED_S + drill.RELEASED_S
    own_s = fault.seconds + CAPACITY_S + 2 * TIMEOUT_S + SHIPPED_S
    assert drill._longest_s(fault, load) - drill.SPARE_S == pytest.approx(of_all_s + own_s)
