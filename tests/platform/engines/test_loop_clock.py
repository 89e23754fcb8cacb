"""Only time in which the event loop ran passes."""

from loraplex.platform.engines.loop_clock import LoopClock


def test_a_late_tick_counts_as_one_interval() -> None:
    clock = LoopClock(interval_s=1.0, now=100.0)
    for now in (100.5, 101.5, 161.5, 162.5):
        clock.tick(now)
    assert clock.time == 3.5
