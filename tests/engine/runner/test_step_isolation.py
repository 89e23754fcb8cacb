"""Bisection of a failed step with a runner that raises whenever a culprit is among its rows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence, SequenceStatus
from loraplex.engine.batch.step_plan import PlannedRow, SampledToken, StepPlan
from loraplex.engine.errors import StepFailed
from loraplex.engine.messages import EngineRequest
from loraplex.engine.runner.step_isolation import StepIsolation
from loraplex.engine.sampling_params import SamplingParams


class Culprits:
    """A runner whose steps succeed without `culprits`. `is_broken`: it cannot run any step."""

    def __init__(self, culprits: set[Sequence], *, is_broken: bool = False, is_lost: bool = False) -> None:
        self.culprits, self.is_broken, self.is_lost = culprits, is_broken, is_lost
        self.runs: list[StepPlan] = []
        self.checks = 0

    def launch(self, plan: StepPlan, rows: list[PlannedRow] | None) -> "Run":
        self.runs.append(plan)
        if self.is_broken or any(row.sequence in self.culprits for row in plan.rows):
            raise RuntimeError("a culprit")
        return Run(plan)

    def require_device(self) -> None:
        if self.is_lost:
            raise RuntimeError("the device is lost")

    def check(self) -> None:
        self.checks += 1
        if self.is_broken:
            raise RuntimeError("broken")


class Run:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.sampled_sequences: list[Sequence] = []

    def sample(self, rows: list[PlannedRow]) -> list[Sequence]:
        self.sampled_sequences = [row.sequence for row in rows]
        return []

    def collect(self) -> dict[Sequence, SampledToken]:
        return {sequence: SampledToken(sequence.order) for sequence in self.sampled_sequences}


def plan_of(count: int, tenants: int = 1) -> StepPlan:
    """Rows of one known token each."""
    rows = []
    for index in range(count):
        request = EngineRequest(
            request_id=str(index),
            namespace=bytes([index % tenants]),
            prompt_token_ids=[5],
            sampling=SamplingParams(max_tokens=2),
        )
        row = Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[5], order=index)
        row.status = SequenceStatus.RUNNING
        rows.append(PlannedRow(row, 0, (5,), (0,), None, samples=True))
    return StepPlan(tuple(rows))


def isolation(runner: Culprits) -> StepIsolation:
    return StepIsolation(runner, lambda plan: list(plan.rows))  # type: ignore[arg-type]


def run(runner: Culprits, plan: StepPlan, good: StepPlan | None = None) -> dict[Sequence, SampledToken]:
    isolated = isolation(runner)
    if good is not None:
        isolated.record(good)
    step = isolated.launch(plan, list(plan.rows))
    assert step.sample(list(plan.rows)) == []
    assert step.has_failed == bool(runner.culprits)
    return step.collect()


@given(st.integers(1, 70), st.data())
def test_at_most_two_culprits_are_found_exactly(count: int, data: st.DataObject) -> None:
    plan = plan_of(count, tenants=data.draw(st.integers(1, 5)))
    culprits = data.draw(st.sets(st.sampled_from([row.sequence for row in plan.rows]), max_size=2))
    known = StepPlan(plan.rows[: data.draw(st.integers(0, count))])
    runner = Culprits(culprits)
    results = run(runner, plan, known)
    assert {row for row, token in results.items() if not token.finite} == culprits
    assert all(isinstance(results[row].failure, StepFailed) for row in culprits)
    assert {row: token.token_id for row, token in results.items() if row not in culprits} == {
        row.sequence: row.sequence.order for row in plan.rows if row.sequence not in culprits
    }
    assert len(runner.runs) <= 1 + 4 * (1 + math.ceil(math.log2(count)))
    orders = [[row.sequence.order for row in part.rows] for part in runner.runs]
    assert all(part == sorted(part) for part in orders), "the rows of a part are in the order of the plan"
    assert runner.checks == (len(culprits) == count)


@given(st.integers(3, 70), st.data())
def test_many_culprits_are_found_in_a_bounded_number_of_runs(count: int, data: st.DataObject) -> None:
    plan = plan_of(count)
    culprits = data.draw(st.sets(st.sampled_from([row.sequence for row in plan.rows])))
    runner = Culprits(culprits)
    results = run(runner, plan)
    assert {row for row, token in results.items() if not token.finite} >= culprits
    assert len(runner.runs) <= 2 + 8 * (1 + math.ceil(math.log2(count)))


def test_a_new_culprit_costs_the_known_rows_one_more_run() -> None:
    plan = plan_of(64)
    runner = Culprits({plan.rows[-1].sequence})
    results = run(runner, plan, StepPlan(plan.rows[:-1]))
    assert [len(part.rows) for part in runner.runs] == [64, 63, 1]
    assert sum(not token.finite for token in results.values()) == 1


def test_many_culprits_of_one_tenant_end_no_other_tenants_rows() -> None:
    plan = plan_of(64, tenants=2)
    culprits = {row.sequence for row in plan.rows if row.sequence.request.namespace == b"\x01"}
    results = run(Culprits(culprits), plan)
    assert {row for row, token in results.items() if not token.finite} == culprits


def test_a_runner_that_runs_nothing_ends_the_engine() -> None:
    plan = plan_of(5)
    step = isolation(runner := Culprits(set(), is_broken=True)).launch(plan, list(plan.rows))
    with pytest.raises(RuntimeError, match="broken"):
        step.collect()
    assert runner.checks == 1


def test_nothing_is_tried_on_a_lost_device() -> None:
    plan = plan_of(5)
    runner = Culprits({plan.rows[0].sequence}, is_lost=True)
    step = isolation(runner).launch(plan, list(plan.rows))
    with pytest.raises(RuntimeError, match="lost"):
        step.collect()
    assert len(runner.runs) == 1
