"""The waiting queue is shared fairly: a tenant that fills it gives way to the others, and only with what has not begun."""

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import EngineOverloaded, QueueShareExceeded
from loraplex.engine.messages import EngineRequest
from loraplex.engine.sampling_params import SamplingParams
from loraplex.engine.scheduling.unstarted_requests import UnstartedRequests

if TYPE_CHECKING:
    from tests.engine.conftest import Simulation

    SimulationType = type[Simulation]


def submit(run: "Simulation", tenant: str, name: str, **fields: Any) -> Sequence:
    return run.submit([2, 3], tenant=tenant, request_id=f"{tenant}{name}", **fields)[0]


def refused(run: "Simulation") -> list[str]:
    run.failures += run.scheduler.take_failures()
    assert all(isinstance(error, EngineOverloaded) for _, error in run.failures)
    return [sequence.request_id for sequence, _ in run.failures]


def test_the_newest_requests_of_the_tenant_with_the_most_give_way(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=6)
    for name in "123456":
        submit(run, "a", name)
    with pytest.raises(QueueShareExceeded, match="6 of at most 6"):
        submit(run, "a", "7")
    for name in "123":
        submit(run, "b", name)
    assert refused(run) == ["a6", "a5", "a4"]
    with pytest.raises(QueueShareExceeded):
        submit(run, "b", "4")
    submit(run, "c", "1")
    submit(run, "c", "2")
    assert refused(run)[3:] == ["a3", "b3"]
    with pytest.raises(QueueShareExceeded):
        submit(run, "c", "3")
    assert run.scheduler.num_rejections == 3 + 5
    run.run()
    run.check_idle()
    served = {sequence.request_id for sequence in run.sequences if sequence.finish_reason == "length"}
    assert served == {"a1", "a2", "b1", "b2", "c1", "c2"}


def test_choices_count_and_a_request_gives_way_as_a_whole(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=8)
    submit(run, "a", "1", sampling={"n": 4})
    submit(run, "a", "2", sampling={"n": 3})
    submit(run, "a", "3")
    submit(run, "b", "1", sampling={"n": 2})
    assert refused(run) == ["a3", "a2"]
    with pytest.raises(EngineOverloaded):
        submit(run, "b", "2", sampling={"n": 7})
    assert refused(run) == ["a3", "a2"], "a request that is refused displaces no other"
    run.run()
    run.check_idle()


def test_a_request_that_has_begun_does_not_give_way(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=4, max_num_seqs=1)
    begun = submit(run, "a", "1", sampling={"n": 3}, max_tokens=9)
    run.step()
    assert begun.num_output_tokens == 1 and run.scheduler.num_waiting == 2
    for name in "2345":
        submit(run, "a", name)
    for name in "12":
        submit(run, "b", name)
    # What waits of the request that has begun neither gives way nor takes a place.
    assert refused(run) == ["a5", "a4"]
    with pytest.raises(EngineOverloaded):
        submit(run, "b", "3")
    run.run()
    run.check_idle()
    assert {s.finish_reason for s in run.sequences if s.request_id in ("a1", "a2", "a3", "b1", "b2")} == {
        "length"
    }


def test_a_tenant_of_twice_the_weight_has_twice_the_share(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=6)
    for name in "123456":
        submit(run, "a", name, weight=2.0)
    for name in "12":
        submit(run, "b", name)
    assert refused(run) == ["a6", "a5"]
    with pytest.raises(EngineOverloaded):
        submit(run, "b", "3")


def test_what_gives_way_while_its_adapter_loads_leaves_nothing(simulation: "SimulationType") -> None:
    run = simulation(max_waiting=2, residency={"load_s": 1.0})
    for name in "12":
        submit(run, "a", name, adapter=name)
    run.step()
    submit(run, "b", "1")
    assert refused(run) == ["a2"] and run.scheduler.num_waiting_for_adapter == 1
    run.run()
    run.check_idle()


def sequence(name: str, tenant: int, n: int, weight: float) -> Sequence:
    request = EngineRequest(
        request_id=name,
        namespace=bytes([tenant]),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1, n=n),
        weight=weight,
    )
    return Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=[1])


class Model:
    """What each tenant has in the queue, and its share of it, next to the queue itself."""

    def __init__(self, size: int, weights: list[float]) -> None:
        self.size, self.weights = size, weights
        self.queue = UnstartedRequests(size)
        self.waiting: list[Sequence] = []

    def count(self, tenant: int) -> int:
        return sum(s.request.sampling.n for s in self.waiting if s.request.namespace == bytes([tenant]))

    def share(self, tenant: int, *more: int) -> float:
        """Of the tenants that wait, and of `more`."""
        queued = {s.request.namespace[0] for s in self.waiting} | set(more)
        return self.size * self.weights[tenant] / sum(self.weights[each] for each in queued)

    def arrive(self, name: str, tenant: int, n: int) -> None:
        new = sequence(name, tenant, n, self.weights[tenant])
        is_within_share = self.count(tenant) + n <= self.share(tenant, tenant)
        try:
            yielding = self.queue.make_room(new.request)
        except QueueShareExceeded:
            assert not is_within_share
            return
        for each in yielding:
            owner = each.request.namespace[0]
            assert self.count(owner) > self.share(owner, tenant) - 1e-9
            mine = [other for other in self.waiting if other.request.namespace == each.request.namespace]
            assert mine[-1] is each, "the newest gives way first"
            self.leave(each)
        self.queue.add(new)
        self.waiting.append(new)
        assert sum(each.request.sampling.n for each in self.waiting) <= self.size

    def leave(self, left: Sequence) -> None:
        self.waiting.remove(left)
        self.queue.discard(left.request)
        self.queue.discard(left.request)


@given(
    size=st.integers(0, 24),
    weights=st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.5]), min_size=4, max_size=4),
    arrivals=st.lists(
        st.one_of(st.tuples(st.integers(0, 3), st.integers(1, 5)), st.just("leave")), max_size=80
    ),
    data=st.data(),
)
def test_a_tenant_within_its_share_is_never_refused(
    size: int, weights: list[float], arrivals: list[tuple[int, int] | str], data: st.DataObject
) -> None:
    model = Model(size, weights)
    for index, arrival in enumerate(arrivals):
        if not isinstance(arrival, str):
            model.arrive(str(index), *arrival)
        elif model.waiting:
            model.leave(data.draw(st.sampled_from(model.waiting)))
