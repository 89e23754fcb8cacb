"""Tenants by their share of the steps: each token counts once, for its tenant, for a minute; the report is bounded."""

from typing import TYPE_CHECKING

from loraplex.engine.messages import BASE_MODEL, OTHER_TENANTS, TenantSteps
from loraplex.engine.scheduling.step_statistics import MAX_TENANTS, StepStatistics

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask, Simulation

    SimulationType = type[Simulation]


def statistics(run: "Simulation") -> StepStatistics:
    return StepStatistics(lambda: run.now, run.scheduler.unstarted_by_namespace)


def finish(run: "Simulation", counted: StepStatistics) -> int:
    """Run to the end and return the number of tokens planned."""
    tokens = 0
    while run.is_busy:
        plan = run.step()
        if plan is not None:
            counted.count(plan)
            tokens += plan.num_tokens
    return tokens


def test_tokens_count_for_their_tenant_as_prefill_or_decode(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4)
    counted = statistics(run)
    run.submit([2] * 20, tenant="a", max_tokens=5)
    run.submit([3] * 7, tenant="a", max_tokens=1)
    run.submit([4] * 3, tenant="b", max_tokens=9)
    tokens = finish(run, counted)
    # The last token of a response is sampled and never computed.
    assert counted.tenants() == [TenantSteps(b"a", 27, 4, 0), TenantSteps(b"b", 3, 8, 0)]
    assert counted.num_tokens == tokens == 42 and sum(counted.histogram) == counted.num_steps


def test_the_newest_step_says_which_adapters_its_rows_have(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4)
    counted = statistics(run)
    assert counted.adapters() == []
    run.submit([2] * 4, tenant="a", adapter="x", max_tokens=3)
    run.submit([2] * 4, tenant="b", adapter="x", max_tokens=3)
    run.submit([2] * 4, tenant="b", max_tokens=2)
    seen = []
    while run.is_busy:
        if (plan := run.step()) is not None:
            counted.count(plan)
            seen.append(counted.adapters())
    assert [BASE_MODEL, "x"] in [sorted(each, key=len, reverse=True) for each in seen] and seen[-1] == ["x"]


def test_tokens_that_a_grammar_forces_count_each(
    simulation: "SimulationType", scripted_mask: "type[ScriptedMask]"
) -> None:
    run = simulation(max_num_seqs=4)
    counted = statistics(run)
    choices = run.submit([2, 3], tenant="a", max_tokens=8, grammar=b"{}")
    run.give_mask(choices, scripted_mask([(5, 6, 7, 5), (5, 6, 7, 6)], fast_forward=True, closes=False))
    run.submit([2, 3], tenant="b", max_tokens=8)
    tokens = finish(run, counted)
    # 5, 6 and 7 are computed in one row, for the choice that comes after them.
    assert counted.tenants() == [TenantSteps(b"b", 2, 7, 0), TenantSteps(b"a", 2, 3, 0)]
    assert tokens == counted.num_tokens == 14


def test_the_window_is_a_minute(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4)
    counted = statistics(run)
    run.submit([2] * 20, tenant="a", max_tokens=1)
    finish(run, counted)
    run.now += 54
    run.submit([2] * 5, tenant="b", max_tokens=1)
    finish(run, counted)
    assert [each.namespace for each in counted.tenants()] == [b"a", b"b"]
    run.now += 7
    assert [each.namespace for each in counted.tenants()] == [b"b"]
    run.now += 60
    assert counted.tenants() == [] and counted.num_tokens == 25


def test_a_tenant_that_only_waits_is_in_it_and_the_rest_is_one_entry(simulation: "SimulationType") -> None:
    run = simulation(max_num_seqs=4)
    counted = statistics(run)
    for index in range(MAX_TENANTS + 3):
        run.submit([2] * (40 - index), tenant=f"t{index:02}", max_tokens=1)
    finish(run, counted)
    run.submit([2], tenant="t05")
    run.submit([2], tenant="waits")
    run.submit([2], tenant="waits")
    run.now += 2
    report = counted.tenants()
    assert len(report) == MAX_TENANTS + 1 and report[5] == TenantSteps(b"t05", 35, 0, 1)
    assert report[-1] == TenantSteps(OTHER_TENANTS, 20 + 19 + 18, 0, 2)
    assert sum(each.tokens for each in report) == counted.num_tokens
