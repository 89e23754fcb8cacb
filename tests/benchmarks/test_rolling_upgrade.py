"""The rolling upgrade, from this checkout to itself: what is measured is whether clients notice that processes are replaced."""

from pathlib import Path

import pytest
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.rolling_upgrade import RollingShape, upgrade_under_load


@pytest.mark.long
async def test_streams_limits_and_ledger_come_through_a_rolling_upgrade(tmp_path: Path) -> None:
    shape = RollingShape(streams=4, tokens=30, bounded_tokens=300, settle_s=2.0)
    shown: list[str] = []
    report = await upgrade_under_load(tmp_path, CHECKOUT, shape, "this checkout", shown.append)
    (case,) = report.cases
    assert case.figure["streams"] > 20 and case.figure["failed"] == case.figure["differences"] == 0, shown
    assert case.figure["limited_tokens"] == case.figure["allowed_tokens"] > 0, case.figure
    assert case.figure["refused"] > 0 and all(ratio.holds for ratio in report.ratios)
