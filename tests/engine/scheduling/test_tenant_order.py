"""The order of sequences outside the queue, against a look at all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.fairness import FairShare


def sequence(tenant: str, order: int) -> Sequence:
    request = EngineRequest(
        request_id=f"{tenant}{order}",
        namespace=tenant.encode(),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1),
    )
    return Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[1], order=order)


def serve_another(policy: FairShare, cost: int) -> None:
    """Move the virtual time, and with it the counters of idle tenants."""
    busy = sequence("busy", 9_000)
    policy.push(busy)
    policy.charge_prompt(busy, cost)
    policy.remove(busy)
    policy.push(busy)
    policy.remove(busy)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_next_one_outside_the_queue_has_the_smallest_rank(data: st.DataObject) -> None:
    """With charges and refunds to any tenant at any time, while others queue and move the virtual time."""
    policy = FairShare(output_cost=1, load_second_cost=1, credit=3)
    outside = policy.new_order()
    known = [sequence(tenant, order) for order, tenant in enumerate("abcdabcdabcd")]
    members: set[Sequence] = set()
    kinds = ["put", "put", "take", "queue", "dequeue", "charge", "refund", "pass time", "look"]
    for _ in range(data.draw(st.integers(1, 60))):
        one, kind = data.draw(st.tuples(st.sampled_from(known), st.sampled_from(kinds)))
        match kind:
            case "put":
                outside.push(one)
                members.add(one)
            case "take":
                outside.remove(one)
                members.discard(one)
            case "queue":
                policy.push(one)
            case "dequeue":
                policy.remove(one)
            case "charge":
                policy.charge_output(one, data.draw(st.integers(0, 4)))
            case "refund":
                policy.charge_adapter_load(one, -float(data.draw(st.integers(1, 6))))
            case "pass time":
                serve_another(policy, data.draw(st.integers(1, 4)))
            case _:
                passed = data.draw(st.sets(st.sampled_from([b"a", b"b", b"c", b"d"])))
                rest = [each for each in members if each.request.namespace not in passed]
                assert outside.peek(passed) is min(rest, key=policy.rank, default=None)
                assert outside.peek() is min(members, key=policy.rank, default=None)
    while members:
        head = outside.peek()
        assert head is min(members, key=policy.rank)
        outside.remove(head)
        members.remove(head)
    assert outside.peek() is None


def test_an_older_sequence_counts_once_the_virtual_time_reaches_its_tenant() -> None:
    policy = FairShare(credit=100)
    outside = policy.new_order()
    oldest, other, newest = sequence("a", 0), sequence("b", 1), sequence("a", 2)
    outside.push(newest)
    outside.push(other)
    policy.charge_prompt(oldest, 10)
    outside.push(oldest)
    assert outside.peek() is other
    serve_another(policy, 10 + 100)
    assert policy.rank(oldest) < policy.rank(other)
    assert outside.peek() is oldest


def test_a_tenant_that_is_forgotten_comes_forward_outside_the_queue() -> None:
    policy = FairShare(credit=100)
    outside = policy.new_order()
    served, never_served = sequence("served", 0), sequence("never", 1)
    policy.charge_output(served, 10)
    for each in (served, never_served):
        outside.push(each)
    assert outside.peek() is never_served
    for order in range(2, 5_000):
        passer_by = sequence(f"t{order}", order)
        policy.push(passer_by)
        policy.remove(passer_by)
    assert policy.counter(b"served") == policy.counter(b"never"), "its counter was dropped"
    assert outside.peek() is served


def test_a_thousand_tenants_without_service_rise_together() -> None:
    """How many are looked at when the virtual time moves does not depend on how many there are."""
    looks = 0

    class Counted(FairShare):
        def counter(self, namespace: bytes) -> float:
            nonlocal looks
            looks += 1
            return super().counter(namespace)

    policy = Counted(credit=100)
    outside = policy.new_order()
    waiting = [sequence(f"w{order}", order) for order in range(1_000)]
    for each in waiting:
        outside.push(each)
    for head in waiting[:100]:
        serve_another(policy, 1_000)
        looks = 0
        assert outside.peek() is head
        outside.remove(head)
        policy.charge_prompt(head, 10)
        assert looks <= 5
