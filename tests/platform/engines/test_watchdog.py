"""When an engine process is killed, on a simulated clock."""

import pytest

from loraplex.platform.engines.process import WatchdogConfig, kill_reason


@pytest.mark.parametrize(
    ("silent_s", "busy", "since_step_s", "killed"),
    [(0.0, False, 999.0, False), (0.0, True, 9.0, False), (0.0, True, 11.0, True), (6.0, False, 0.0, True)],
)
def test_kill_reason(silent_s: float, busy: bool, since_step_s: float, killed: bool) -> None:
    limits = WatchdogConfig(unresponsive_s=5.0, hang_s=10.0)
    assert (kill_reason(limits, silent_s, busy, since_step_s) is not None) == killed
