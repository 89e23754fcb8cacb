"""Restart decisions on a simulated clock."""

from loraplex.platform.processes.restart_budget import RestartBudget, RestartPolicy


def test_delays_double_up_to_a_bound_and_a_crash_loop_ends() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1.0, max_delay_s=5.0, max_restarts=5, window_s=100.0))
    assert [budget.next_delay(float(now)) for now in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]
    assert budget.restarts == 5


def test_without_a_bound_restarts_go_on_with_capped_delays_for_ever() -> None:
    budget, now, delays = RestartBudget(RestartPolicy()), 0.0, []
    for _ in range(1000):
        delay = budget.next_delay(now)
        assert delay is not None
        delays.append(delay)
        now += delay
    assert delays[:9] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert set(delays[9:]) == {60.0}
    assert budget.next_delay(now + 600.0) == 0.5


def test_any_number_of_restarts_has_a_delay() -> None:
    budget = RestartBudget(RestartPolicy(max_delay_s=0.01))
    assert {budget.next_delay(0.0) for _ in range(1_100)} == {0.01}


def test_old_restarts_are_forgiven() -> None:
    budget = RestartBudget(RestartPolicy(first_delay_s=1.0, max_restarts=2, window_s=100.0))
    assert [budget.next_delay(now) for now in (0.0, 10.0, 20.0, 100.0, 111.0)] == [1.0, 2.0, None, 2.0, 2.0]


def test_an_immediate_first_restart_comes_before_the_doubling_delays() -> None:
    policy = RestartPolicy(
        first_delay_s=1.0, max_delay_s=3.0, max_restarts=5, window_s=100.0, is_first_immediate=True
    )
    budget = RestartBudget(policy)
    assert [budget.next_delay(float(now)) for now in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, None]
    assert budget.next_delay(200.0) == 0.0
