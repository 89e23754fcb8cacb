"""The queue serves tenants in turn."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from loraplex.grammar.trial.fair_queue import TenantFairQueue


@dataclass(frozen=True)
class Item:
    namespace: bytes
    number: int = 0


def test_tenants_alternate() -> None:
    queue: TenantFairQueue[Item] = TenantFairQueue(concurrent=1, concurrent_per_tenant=1)
    for number in range(3):
        queue.put(Item(b"flood", number))
    queue.put(Item(b"quiet"))
    order = []
    while (item := queue.take()) is not None:
        order.append(item)
        queue.done(item.namespace)
    assert order == [Item(b"flood", 0), Item(b"quiet"), Item(b"flood", 1), Item(b"flood", 2)]


def test_a_tenant_does_not_take_every_slot() -> None:
    queue: TenantFairQueue[Item] = TenantFairQueue(concurrent=2, concurrent_per_tenant=1)
    queue.put(Item(b"flood", 0))
    queue.put(Item(b"flood", 1))
    assert queue.take() == Item(b"flood", 0)
    assert queue.take() is None
    queue.put(Item(b"quiet"))
    assert queue.take() == Item(b"quiet")


def test_what_could_not_be_finished_is_next() -> None:
    queue: TenantFairQueue[Item] = TenantFairQueue(concurrent=1, concurrent_per_tenant=1)
    queue.put(Item(b"a", 0))
    queue.put(Item(b"a", 1))
    first = queue.take()
    assert first is not None
    queue.put_back(first)
    assert queue.take() == first


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take", "done", "remove"]), st.integers(0, 3))),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_nothing_is_lost_and_no_bound_is_passed(
    steps: list[tuple[str, int]], concurrent: int, concurrent_per_tenant: int
) -> None:
    queue: TenantFairQueue[Item] = TenantFairQueue(concurrent, concurrent_per_tenant)
    waiting: list[Item] = []
    running: list[Item] = []
    for number, (step, tenant) in enumerate(steps):
        match step:
            case "put":
                waiting.append(Item(bytes([tenant]), number))
                queue.put(waiting[-1])
            case "remove" if waiting:
                queue.remove(waiting.pop(tenant % len(waiting)))
            case "done" if running:
                queue.done(running.pop(tenant % len(running)).namespace)
            case "take":
                item = queue.take()
                counts = {
                    one.namespace: sum(other.namespace == one.namespace for other in running)
                    for one in waiting
                }
                may = len(running) < concurrent and any(
                    count < concurrent_per_tenant for count in counts.values()
                )
                assert (item is not None) == may
                if item is not None:
                    assert item == next(one for one in waiting if one.namespace == item.namespace)
                    waiting.remove(item)
                    running.append(item)
        assert len(queue) == len(waiting)
        assert len(running) <= concurrent
