"""What planning looks at while hundreds of adapters wait, counted, and that it decides as if it looked at all of them."""

from collections.abc import Collection
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import AdapterRef
from loraplex.engine.scheduling.fairness import FairShare
from loraplex.engine.scheduling.tenant_order import TenantOrder

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation

ROWS = 64


class CountedFairShare(FairShare):
    """Counts how often a tenant's counter is read: once at least for every sequence that is compared."""

    num_looks = 0

    def counter(self, namespace: bytes) -> float:
        self.num_looks += 1
        return super().counter(namespace)


class SortedOrder(TenantOrder):
    """The reference: ranks every sequence each time."""

    def __init__(self, policy: FairShare) -> None:
        self._policy = policy
        self._members: set[Sequence] = set()

    def push(self, sequence: Sequence) -> None:
        self._members.add(sequence)

    def peek(self, passed: Collection[bytes] = ()) -> Sequence | None:
        members = [each for each in self._members if each.request.namespace not in passed]
        return min(members, key=self._policy.rank, default=None)

    def remove(self, sequence: Sequence) -> None:
        self._members.discard(sequence)


class SortedFairShare(FairShare):
    def new_order(self) -> TenantOrder:
        return SortedOrder(self)


def looks_per_step(simulation: "type[Simulation]", budget: int, adapters: int) -> list[int]:
    """Fill the batch with rows of a loud tenant, let others wait for their adapters, and plan 60 steps."""
    policy = CountedFairShare()
    run = simulation(
        num_blocks=8192,
        policy=policy,
        residency={"budget": budget, "load_s": 0.03},
        max_num_seqs=ROWS,
        max_num_batched_tokens=256,
        max_slot_wait_s=1000.0,
        max_waiting=4096,
    )
    for index in range(ROWS):
        run.submit([2 + index] * 8, tenant="loud", max_tokens=150)
    for _ in range(8):
        run.step()
    assert run.scheduler.num_running == ROWS
    for index in range(adapters):
        # A quarter of all adapters is one tenant's.
        tenant = f"t{index % 100 if index % 4 else 0}"
        run.submit([2 + index] * 32, tenant=tenant, adapter=f"a{index}", max_tokens=12)
    run.step()
    assert run.scheduler.num_waiting_for_adapter > 0.8 * adapters
    run.step_s = 0.03
    looks = []
    for _ in range(60):
        before = policy.num_looks
        plan = run.scheduler.schedule()
        looks.append(policy.num_looks - before)
        assert plan is not None
        run.scheduler.complete(plan, run.execute(plan))
        run.now += run.step_s
    assert run.scheduler.num_preemptions
    return looks


@pytest.mark.parametrize("budget", [8, 100], ids=["loads are refused", "loads go on"])
def test_a_step_looks_at_no_more_of_a_thousand_waiting_adapters_than_of_two_hundred(
    simulation: "type[Simulation]", budget: int
) -> None:
    for adapters in (200, 1000):
        looks = looks_per_step(simulation, budget, adapters)
        assert max(looks) <= 3 * ROWS


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    budget=st.integers(1, 6),
    cap=st.integers(1, 4),
    load_s=st.sampled_from([0.0, 0.15, 0.5]),
)
def test_steps_are_those_of_ranking_all_that_wait(
    simulation: "type[Simulation]",
    data: st.DataObject,
    budget: int,
    cap: int,
    load_s: float,
) -> None:
    kept, ranked = (
        simulation(
            num_blocks=60,
            policy=policy(credit=40, load_second_cost=60),
            residency={"budget": budget, "load_s": load_s, "broken": {"bad"}},
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_adapters_per_step=cap,
            max_adapter_wait_s=1.0,
        )
        for policy in (FairShare, SortedFairShare)
    )
    for run in (kept, ranked):
        charge_more_than_loads_take(run)
    number = st.integers(1, 12)
    adapters = st.sampled_from([None, "a", "b", "c", "d", "bad"])
    for _ in range(data.draw(st.integers(10, 60))):
        for _ in range(data.draw(st.integers(0, 2))):
            tenant, adapter = data.draw(st.tuples(st.sampled_from("tuvw"), adapters))
            length, output = data.draw(st.tuples(number, number))
            for run in (kept, ranked):
                run.submit([2 + length] * length, tenant=tenant, adapter=adapter, max_tokens=output)
        if kept.sequences and data.draw(st.integers(0, 5)) == 0:
            index = data.draw(st.integers(0, len(kept.sequences) - 1))
            for run in (kept, ranked):
                run.scheduler.abort(run.sequences[index].request_id)
        same_step(kept, ranked)
    while kept.is_busy:
        same_step(kept, ranked)
    kept.check_idle()


def charge_more_than_loads_take(run: "Simulation") -> None:
    residency = run.residency

    def load_seconds(adapter: AdapterRef) -> float:
        return 0.2 if residency.tier(adapter) == "device" else 0.5

    residency.load_seconds = load_seconds  # type: ignore[method-assign]


def same_step(kept: "Simulation", ranked: "Simulation") -> None:
    rows = [
        [] if plan is None else [(row.sequence.order, len(row.token_ids)) for row in plan.rows]
        for plan in (kept.step(), ranked.step())
    ]
    assert rows[0] == rows[1]
    assert kept.residency.due.keys() == ranked.residency.due.keys()
