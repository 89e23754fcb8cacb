"""The rolling upgrade, from this checkout to itself: what is measured is whether clients notice that processes are replaced."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest
from tests.benchmarks import rolling_upgrade
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.rolling_tenants import RollingTenant
from tests.benchmarks.rolling_upgrade import Client, RollingShape, limit_is_reached, upgrade_under_load

from loraplex.platform.drills.traffic import ReportedUsage, RequestOutcome

ANSWERED = RequestOutcome("answered", 0.0, 1.0, 200, None, True, ReportedUsage(5, 0, 5), 5)
REFUSED = RequestOutcome("refused", 0.0, 1.0, 429, "quota_exceeded", False, None, 0)


def bounded_client(*outcomes: RequestOutcome) -> Client:
    return Client(RollingTenant(uuid4(), "key", "revision"), 5, False, list(outcomes))


async def test_traffic_goes_on_until_the_limit_is_used_and_has_refused_a_request() -> None:
    client = bounded_client(ANSWERED)
    waiting = asyncio.create_task(limit_is_reached(client, 25))
    for outcome in (REFUSED, ANSWERED):
        await asyncio.sleep(2.5 * rolling_upgrade.RETRY_S)
        assert not waiting.done()
        client.outcomes.append(outcome)
    assert await waiting


@pytest.mark.parametrize("outcomes", [(), (ANSWERED,), (ANSWERED, ANSWERED), (ANSWERED, REFUSED)])
async def test_a_limit_that_is_not_used_or_never_refuses_is_given_up(
    outcomes: tuple[RequestOutcome, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling_upgrade, "LIMIT_S", 0.0)
    assert not await limit_is_reached(bounded_client(*outcomes), 20)


@pytest.mark.long
async def test_streams_limits_and_ledger_come_through_a_rolling_upgrade(tmp_path: Path) -> None:
    shape = RollingShape(streams=4, tokens=30, bounded_tokens=300, settle_s=2.0)
    shown: list[str] = []
    report = await upgrade_under_load(tmp_path, CHECKOUT, shape, "this checkout", shown.append)
    (case,) = report.cases
    assert case.figure["streams"] > 20 and case.figure["failed"] == case.figure["differences"] == 0, shown
    assert case.figure["limited_tokens"] == case.figure["allowed_tokens"] > 0, case.figure
    assert case.figure["refused"] > 0 and all(ratio.holds for ratio in report.ratios)
