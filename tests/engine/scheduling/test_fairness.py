"""Policies alone, and fair share driven through the simulated engine."""

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.fairness import FairShare

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation


def sequence(tenant: str, order: int, weight: float = 1.0) -> Sequence:
    request = EngineRequest(
        request_id=f"{tenant}{order}",
        namespace=tenant.encode(),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
        weight=weight,
    )
    return Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[1], order=order)


def drain(policy: FairShare, cost: int = 10) -> list[str]:
    served = []
    while (head := policy.peek()) is not None:
        policy.remove(head)
        policy.charge_prompt(head, cost)
        served.append(head.request_id)
    return served


def test_tenants_take_turns_whatever_their_backlog() -> None:
    policy = FairShare()
    for order in range(6):
        policy.push(sequence("heavy", order))
    policy.push(sequence("light", 6))
    policy.push(sequence("light", 7))
    assert drain(policy) == ["heavy0", "light6", "heavy1", "light7", "heavy2", "heavy3", "heavy4", "heavy5"]


def test_weight_two_gets_twice_the_service() -> None:
    policy = FairShare()
    for order in range(0, 12, 2):
        policy.push(sequence("gold", order, weight=2.0))
        policy.push(sequence("free", order + 1))
    served = [name[:4] for name in drain(policy)]
    assert served[:6].count("gold") == 4


def test_idle_time_earns_no_more_than_the_credit() -> None:
    policy = FairShare(credit=100)
    busy = sequence("busy", 0)
    policy.push(busy)
    policy.charge_output(busy, 500)
    newcomer = sequence("new", 1)
    policy.push(newcomer)
    assert policy.counter(b"new") == policy.counter(b"busy") - 100 == 900
    policy.charge_output(newcomer, 30)
    policy.remove(newcomer)
    policy.push(newcomer)
    assert policy.counter(b"new") == 960, "the credit that is left"
    policy.remove(busy)
    policy.remove(newcomer)
    policy.push(sequence("later", 2))
    assert policy.counter(b"later") == 900, "what was served to those below their share moves no virtual time"


def test_what_a_lone_tenant_is_served_outside_the_queue_is_no_credit_of_others() -> None:
    policy = FairShare(credit=100)
    busy = sequence("busy", 0)
    policy.push(busy)
    policy.remove(busy)
    policy.charge_output(busy, 500)
    policy.push(sequence("new", 1))
    assert policy.counter(b"new") == policy.counter(b"busy") - 100


def test_an_idle_tenant_pays_for_its_adapter_from_where_it_returns() -> None:
    policy = FairShare(credit=100, load_second_cost=1000)
    idle, busy = sequence("idle", 0), sequence("busy", 1)
    policy.push(idle)
    policy.remove(idle)
    policy.push(busy)
    policy.charge_output(busy, 5_000)
    policy.charge_adapter_load(idle, 2.0)
    policy.push(idle)
    assert policy.counter(b"idle") == policy.counter(b"busy") - 100 + 2_000


def test_a_crowd_that_always_returns_from_idle_does_not_starve_a_backlogged_tenant() -> None:
    credit, cost = 500, 50
    policy = FairShare(credit=credit)
    backlog = [sequence("busy", order) for order in range(2_000)]
    for item in backlog:
        policy.push(item)
    crowd = [sequence(f"t{index}", 10_000 + index) for index in range(20)]
    served = Counter[str]()
    for turn in range(2_000):
        visitor = crowd[turn % len(crowd)]
        policy.push(visitor)
        head = policy.peek()
        assert head is not None
        policy.remove(head)
        policy.charge_prompt(head, cost)
        served[head.request.namespace.decode()] += cost
        assert max(served.values()) - served["busy"] <= credit + 2 * cost
    assert served["busy"] >= 2_000 * cost / 21 - credit


def test_output_tokens_and_adapter_loads_cost_more_than_prompt_tokens() -> None:
    policy = FairShare(prompt_cost=1, output_cost=2, load_second_cost=1000)
    item = sequence("t", 0, weight=2.0)
    policy.push(item)
    policy.charge_prompt(item, 10)
    policy.charge_output(item, 10)
    policy.charge_adapter_load(item, 0.1)
    assert policy.rank(item) == ((10 + 20 + 100) / 2, 0)
    policy.charge_adapter_load(item, -0.036)
    assert policy.rank(item) == ((10 + 20 + 64) / 2, 0)


def test_idle_tenants_are_forgotten() -> None:
    policy = FairShare()
    for order in range(10_000):
        item = sequence(f"t{order}", order)
        policy.push(item)
        policy.charge_prompt(item, 1)
        policy.remove(item)
    assert len(policy._counters) < 5_000


@given(st.data())
def test_the_next_one_is_always_the_least_served_tenants_oldest(data: st.DataObject) -> None:
    """Against looking at every tenant, with charges and refunds to any of them at any time."""
    policy = FairShare()
    known = [sequence(tenant, order) for order, tenant in enumerate("abcabcab")]
    queued: set[Sequence] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        one = data.draw(st.sampled_from(known))
        match data.draw(st.sampled_from(["push", "push", "remove", "charge", "refund", "next"])):
            case "push":
                policy.push(one)
                queued.add(one)
            case "remove":
                policy.remove(one)
                queued.discard(one)
            case "charge":
                policy.charge_output(one, data.draw(st.integers(0, 5)))
            case "refund":
                policy.charge_adapter_load(one, -0.001)
        assert policy.peek() is min(queued, key=policy.rank, default=None)
        assert len(policy) == len(queued)


def test_a_load_costs_what_it_took_and_not_what_was_expected_of_it(simulation: "type[Simulation]") -> None:
    policy = FairShare()
    run = simulation(policy=policy, residency={"load_s": 0.4})
    expected, took = 0.125, 0.5
    run.residency.load_seconds = lambda adapter: took if run.now >= 0.4 else expected  # type: ignore[method-assign]
    run.submit([2] * 8, tenant="t", adapter="a", max_tokens=3)
    run.step()
    assert policy.counter(b"t") == expected * 4096
    run.run()
    assert policy.counter(b"t") == took * 4096 + 8 + 2 * 3


def service(run: "Simulation", tenant: bytes) -> int:
    """Cost served so far, as the default `FairShare` counts it."""
    own = [s for s in run.sequences if s.request.namespace == tenant]
    prompts = sum(s.num_prompt_tokens for s in own if s.num_computed_tokens or s.num_output_tokens)
    return prompts + 2 * sum(s.num_output_tokens for s in own)


def test_backlogged_tenants_differ_by_a_bounded_amount_of_service(simulation: "type[Simulation]") -> None:
    run = simulation(max_num_seqs=4, max_num_batched_tokens=32, prefix_caching=False)
    for index in range(120):
        run.submit([index + 2] * 20, tenant="heavy", max_tokens=20)
        if index % 2:
            run.submit([index + 2] * 5, tenant="light", max_tokens=10)
    largest = 0
    for _ in range(250):
        run.step()
        largest = max(largest, abs(service(run, b"heavy") - service(run, b"light")))
    assert len(run.first_token_at) > 30
    assert largest <= 2 * max(20, 2 * 4 * 20)


def test_a_heavy_tenant_does_not_starve_a_light_one(
    simulation: "type[Simulation]",
) -> None:
    run = simulation(max_num_seqs=2, max_num_batched_tokens=32, max_slot_wait_s=1000.0)
    for index in range(50):
        run.submit([index + 2] * 8, tenant="heavy", max_tokens=16)
    light = run.submit([3] * 8, tenant="light", max_tokens=4)[0]
    run.run()
    run.check_idle()
    assert run.first_token_at[light] <= 10.0
