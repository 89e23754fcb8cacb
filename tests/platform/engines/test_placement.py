"""Placement by properties: bounded load, homes that only move with their replica, memory tiers, and order that is always the same."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.messages import AdapterKey, EngineStats
from loraplex.platform.engines.placement import (
    SPILL_FACTOR,
    FleetLoad,
    PlacementRequest,
    ReplicaState,
    has_share,
    rank,
    rendezvous,
    replica_number,
    replica_state,
    score,
)

NAMESPACE = b"n" * 32
ADAPTER: AdapterKey = (NAMESPACE, "a" * 64)
RESIDENT = frozenset([ADAPTER])
REQUEST = PlacementRequest(namespace=NAMESPACE, adapter=ADAPTER)

states_of = st.lists(
    st.builds(
        ReplicaState,
        replica_id=st.text(min_size=1, max_size=4),
        capacity=st.integers(1, 64),
        open_requests=st.integers(0, 90),
        device=st.sampled_from([frozenset(), RESIDENT]),
        host=st.sampled_from([frozenset(), RESIDENT]),
        room=st.sampled_from(["free", "evictable", "none"]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda state: state.replica_id,
)
requests = st.builds(
    PlacementRequest,
    namespace=st.binary(min_size=32, max_size=32),
    adapter=st.sampled_from([None, ADAPTER]),
    homes=st.integers(1, 3),
)


def replica(replica_id: str = "r", **known: object) -> ReplicaState:
    fields: Mapping[str, object] = {"capacity": 10} | known
    return ReplicaState(replica_id=replica_id, **fields)  # type: ignore[arg-type]


def order_of(key: AdapterKey, names: list[str]) -> list[str]:
    return rendezvous(key, {name: replica_number(name) for name in names})


@given(states_of, requests)
def test_a_replica_with_its_share_is_never_before_one_without(
    states: list[ReplicaState], request: PlacementRequest
) -> None:
    fleet = FleetLoad(sum(each.open_requests for each in states), sum(each.capacity for each in states))
    by_id = {each.replica_id: each for each in states}
    full = [has_share(by_id[each], fleet) for each in rank(states, request)]
    assert full == sorted(full) and len(full) == len(states)
    assert not full[0], "the shares are larger than the mean, so one replica has less than its own"


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.integers(1, 200), requests)
def test_no_burst_takes_a_replica_over_its_share(
    capacities: list[int], burst: int, request: PlacementRequest
) -> None:
    states = [replica(str(i), capacity=capacity) for i, capacity in enumerate(capacities)]
    for _ in range(burst):
        states[int(rank(states, request)[0])].open_requests += 1
    for state in states:
        assert state.open_requests <= SPILL_FACTOR * burst * state.capacity / sum(capacities) + 1


@given(states_of, requests, st.data())
def test_a_removed_replica_moves_only_what_had_its_home_there(
    states: list[ReplicaState], request: PlacementRequest, data: st.DataObject
) -> None:
    fleet = FleetLoad(sum(each.open_requests for each in states), sum(each.capacity for each in states))
    order = rank(states, request, fleet)
    gone = data.draw(st.sampled_from(order))
    left = rank([each for each in states if each.replica_id != gone], request, fleet)
    homes = order_of(request.home_key, [each.replica_id for each in states])[: request.homes + 1]
    if gone not in homes:
        assert left == [each for each in order if each != gone]


@given(states_of, requests)
def test_the_order_does_not_depend_on_the_order_of_the_states(
    states: list[ReplicaState], request: PlacementRequest
) -> None:
    by_load = sorted(states, key=lambda each: each.open_requests)
    assert rank(states, request) == rank(states[::-1], request) == rank(by_load, request)


def test_tiers_in_their_order() -> None:
    device, host, free = replica(device=RESIDENT), replica(host=RESIDENT), replica()
    evictable, pinned = replica(room="evictable"), replica(room="none")
    scores = [score(state, REQUEST) for state in (device, host, free, evictable, pinned)]
    assert scores == [2.0, 1.7, 1.6, 1.3, 1.0]
    assert score(replica(device=RESIDENT, open_requests=10), REQUEST) == pytest.approx(-1.0, abs=0.01)
    assert score(replica(device=RESIDENT, open_requests=15), REQUEST) == pytest.approx(-1.5, abs=0.01)
    assert score(pinned, PlacementRequest(namespace=NAMESPACE)) == 2.0, "the base model is everywhere"


def test_the_prefix_and_the_home_decide_between_replicas_of_one_tier() -> None:
    states = [replica(name) for name in "abc"]
    home, second, third = rank(states, REQUEST)
    prefixes = PlacementRequest(namespace=NAMESPACE, adapter=ADAPTER, prefix_shares={third: 1.0})
    assert rank(states, prefixes) == [home, third, second]
    for state in states:
        state.room = "evictable" if state.replica_id == home else "free"
    assert rank(states, REQUEST) == [second, home, third]
    for state in states:
        state.device = RESIDENT if state.replica_id == third else frozenset()
    assert rank(states, REQUEST)[0] == third


def test_a_hot_adapter_goes_to_the_less_loaded_of_its_homes() -> None:
    states = [replica(str(i), open_requests=4) for i in range(9)]
    order = order_of(ADAPTER, [state.replica_id for state in states])
    states[int(order[0])].open_requests = 5
    assert rank(states, PlacementRequest(namespace=NAMESPACE, adapter=ADAPTER))[0] == order[0]
    assert rank(states, PlacementRequest(namespace=NAMESPACE, adapter=ADAPTER, homes=2))[0] == order[1]


def test_homes_spread_evenly_and_begin_with_the_first_of_the_order() -> None:
    names = [f"replica-{i}" for i in range(20)]
    homes = Counter(order_of((NAMESPACE, str(i)), names)[0] for i in range(4000))
    assert len(homes) == 20 and 140 < min(homes.values()) and max(homes.values()) < 260
    numbers = {name: replica_number(name) for name in names}
    assert rendezvous(ADAPTER, numbers, 3) == rendezvous(ADAPTER, numbers)[:3]


def test_a_state_from_statistics() -> None:
    def read(**known: object) -> ReplicaState:
        return replica_state("r", EngineStats(**known), 3)  # type: ignore[arg-type]

    assert read() == ReplicaState(replica_id="r", capacity=64, open_requests=3)
    state = read(max_running=8, device_adapters=[ADAPTER], adapter_bytes=6, adapter_budget_bytes=12)
    assert state.capacity == 8 and state.device == RESIDENT and state.room == "free"
    state = read(device_adapters=[ADAPTER], adapter_bytes=6, adapter_budget_bytes=11, host_adapters=[ADAPTER])
    assert state.host == RESIDENT and state.room == "evictable"
    state = read(device_adapters=[ADAPTER], adapter_bytes=6, adapter_budget_bytes=11, pinned_adapters=1)
    assert state.room == "none"
