"""A slow step is reported once, from its start, and by ids alone; steps in time are not."""

from tests.engine.local_engine.engine_requests import request

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.step_watch import MAX_ROWS, StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plan_of(rows: int) -> StepPlan:
    """Rows of three tokens, each with an adapter of its own."""
    requests = [request(f"r{number}", adapter=f"{number:064}") for number in range(rows)]
    sequences = [
        Sequence(request=each, choice=0, arrival=0.0, seed=0, token_ids=[77, 78, 79]) for each in requests
    ]
    return StepPlan(
        tuple(PlannedRow(each, 5, (77, 78, 79), (1,), each.request.adapter, True) for each in sequences)
    )


def test_a_step_is_slow_from_its_own_start_and_reported_once() -> None:
    clock = Clock()
    watch = StepWatch(2.0, clock)
    clock.now = 100.0
    assert watch.check() is None, "an idle engine has no step"
    for _ in range(3):
        watch.begin()
        clock.now += 1.9
        assert watch.check() is None
        watch.end()
    watch.begin()
    clock.now += 2.0
    slow = watch.check()
    assert slow is not None and (round(slow.seconds, 3), slow.step) == (2.0, None)
    clock.now += 50.0
    assert watch.check() is None
    watch.end()
    watch.begin()
    clock.now += 3.0
    assert watch.check() is not None and watch.num_slow == 2


def test_what_a_step_computes_is_named_by_ids_and_bounded() -> None:
    clock = Clock()
    watch = StepWatch(2.0, clock)
    watch.begin()
    watch.launch(plan_of(MAX_ROWS + 3))
    clock.now += 2.0
    slow = watch.check()
    assert slow is not None and slow.step is not None
    assert (slow.step["rows"], slow.step["tokens"]) == (MAX_ROWS + 3, 3 * (MAX_ROWS + 3))
    assert len(slow.step["some_rows"]) == len(slow.step["adapters"]) == MAX_ROWS
    assert slow.step["some_rows"][0] == "r0#0 3 tokens at 5" and slow.step["adapters"][0] == "0" * 64
    assert "77" not in str({**slow.step, "adapters": ()}), "tokens are not named"
    (stack,) = (stack for name, stack in slow.stacks.items() if name.startswith("MainThread "))
    assert "test_what_a_step_computes" in stack
