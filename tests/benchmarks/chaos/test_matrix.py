"""What the matrix makes of its cells: the verdicts, the skipped ones, and one cell of a real installation."""

from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest
from tests.benchmarks.chaos import matrix
from tests.benchmarks.chaos.__main__ import measure_in_namespace
from tests.benchmarks.chaos.cell import CellResult, Customer, Tenant, count_outcomes
from tests.benchmarks.chaos.matrix import ChaosJob, figure_of, measure_chaos, ratios_of

from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.drills.ledger_drift import LedgerDrift
from loraplex.platform.drills.traffic import CLIENT_TIMEOUT, CONNECTION_LOST, RequestOutcome, Traffic

CLEAN = CellResult(requests=3, recovery_s=1.0, drifts=[LedgerDrift(rows=3)])


def broken() -> CellResult:
    drift = LedgerDrift(rows=2, drift_pico=7, missing=1, open=1)
    errors = Counter({"200 connection_lost": 2})
    return CellResult(
        errors=errors,
        unexpected_ends=2,
        given_up=3,
        drifts=[drift],
        sums_drift_pico=5,
        quota_differences=["1 reservations are left"],
    )


def verdicts(*results: tuple[str, CellResult]) -> dict[str, tuple[float, bool | None]]:
    return {ratio.name: (ratio.value, ratio.holds) for ratio in ratios_of(results)}


def test_a_broken_cell_fails_every_demand() -> None:
    assert all(holds for _, holds in verdicts(("kill engine", CLEAN)).values())
    assert [*verdicts(("kill engine", CLEAN), ("stop engine", broken())).values()] == [
        (12.0, False),
        (1.0, False),
        (2.0, False),
        (3.0, False),
        (1.0, False),
        (1.0, False),
    ]


def test_only_a_killed_gateway_may_cut_responses_off() -> None:
    (value, holds) = verdicts(("kill gateway", broken()))["unexpected ends but of kill gateway"]
    assert (value, holds) == (0.0, True)


def test_the_figures_name_every_error() -> None:
    figure = figure_of(broken())
    assert (figure["errors"], figure["errors_by_code"]) == (2, {"200 connection_lost": 2})
    assert (figure["unexpected_ends"], figure["given_up"]) == (2, 3)
    assert (figure["drift_pico"], figure["quotas_exact"]) == (12, False)


def outcome(status: int, code: str | None) -> RequestOutcome:
    return RequestOutcome("a", 1.0, 2.0, status, code, code is None, None, 0)


@pytest.mark.parametrize("status", [0, 200])
def test_a_client_that_gave_up_was_not_cut_off(status: int) -> None:
    traffic = Traffic(["http://gateway"], "key", "model", 1.0, 1)
    traffic.outcomes += [outcome(status, CLIENT_TIMEOUT), outcome(200, CONNECTION_LOST), outcome(200, None)]
    result = CellResult()
    count_outcomes(result, [Customer(Tenant("acme", 1.0), uuid4(), traffic)], 0.0)
    assert (result.requests, result.given_up, result.unexpected_ends) == (3, 1, 1)


async def test_a_fault_that_is_impossible_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "missing_for_clocks", lambda: "libfaketime is missing")
    job = ChaosJob(
        model="", faults=("disk-full", "clock-jump"), components=("gateway",), seconds=3.0, scripted=True
    )
    report = await measure_chaos(job, print)
    reasons = {case.name: case.figure["skipped"] for case in report.cases}
    assert reasons == {
        "disk-full gateway": "this user may not mount a tmpfs in a namespace of its own",
        "clock-jump gateway": "libfaketime is missing",
    }


@pytest.mark.long
def test_a_cell_of_a_real_installation() -> None:
    model = ensure_demo_model(Path(__file__).resolve().parents[3] / ".loraplex-test")
    job = ChaosJob(model=str(model), faults=("kill",), components=("valkey",), seconds=3.0, scripted=True)
    report = measure_in_namespace(job)
    assert [case.name for case in report.cases] == ["kill valkey"]
    assert all(ratio.holds for ratio in report.ratios), report
