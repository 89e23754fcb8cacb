"""A router's index: few candidates of many replicas, the order of `rank`, loads between reports, and several homes of a hot adapter."""

from collections import Counter
from random import Random

from loraplex.engine.messages import AdapterKey
from loraplex.platform.engines.placement import (
    PlacementRequest,
    ReplicaState,
    rank,
    rendezvous,
    replica_number,
)
from loraplex.platform.engines.prefix_index import PromptPrefix
from loraplex.platform.engines.replica_index import MAX_ROUTERS, QUIET_LOAD, ReplicaIndex

NAMESPACE = b"n" * 32
ROWS = 8
PREFIX = [PromptPrefix(0.5, b"p")]


def key(number: int) -> AdapterKey:
    return NAMESPACE, f"{number:064}"


def state(replica_id: str, open_requests: int = 0, *device: AdapterKey) -> ReplicaState:
    return ReplicaState(
        replica_id=replica_id, capacity=ROWS, open_requests=open_requests, device=frozenset(device)
    )


def fleet(count: int) -> ReplicaIndex:
    index = ReplicaIndex(Random(1))
    for number in range(count):
        index.update(state(str(number)))
    return index


def first(index: ReplicaIndex, adapter: AdapterKey) -> str:
    return index.choose(NAMESPACE, adapter)[0]


def test_of_many_replicas_it_ranks_few_and_begins_with_the_home_that_rank_finds() -> None:
    index = fleet(300)
    numbers = {str(number): replica_number(str(number)) for number in range(300)}
    for number in range(50):
        chosen = index.choose(NAMESPACE, key(number))
        assert chosen[0] == rendezvous(key(number), numbers, 1)[0] and 2 <= len(chosen) <= 4
    everyone = [state(each) for each in numbers]
    assert rank(everyone, PlacementRequest(namespace=NAMESPACE, adapter=key(0)))[0] == first(index, key(0))
    assert sorted(fleet(8).choose(NAMESPACE, key(0))) == [str(number) for number in range(8)]
    assert ReplicaIndex(Random(1)).choose(NAMESPACE, key(0)) == []


def test_a_holder_of_the_adapter_or_the_prefix_is_a_candidate() -> None:
    index = fleet(300)
    home = first(index, key(0))
    other = str((int(home) + 1) % 300)
    index.sent(other, NAMESPACE, key(0), PREFIX)
    index.ended(other, NAMESPACE, key(0))
    assert first(index, key(0)) == home and other in index.choose(NAMESPACE, key(0), PREFIX)
    index.update(state(other, 0, key(0)))
    assert first(index, key(0)) == other
    index.update(state(other))
    assert first(index, key(0)) == home
    index.update(state(other, 0, key(0)))
    index.remove(other)
    assert first(index, key(0)) == home and len(index) == 299
    assert other not in index.choose(NAMESPACE, key(0), PREFIX)


def test_a_replica_that_leaves_moves_only_its_own_adapters() -> None:
    index = fleet(50)
    homes = {number: first(index, key(number)) for number in range(200)}
    index.remove("7")
    index.remove("unknown")
    assert all(
        first(index, key(number)) == home if home != "7" else first(index, key(number)) != "7"
        for number, home in homes.items()
    )


def test_a_burst_for_one_adapter_fills_few_replicas_and_none_above_its_share() -> None:
    index = fleet(300)
    sent = Counter[str]()
    for _ in range(40):
        replica = first(index, key(0))
        index.sent(replica, NAMESPACE, key(0))
        sent[replica] += 1
    assert max(sent.values()) == QUIET_LOAD * ROWS
    assert len(sent) <= 26, "by the mean of all replicas alone, each request would go to another one"
    order = rendezvous(key(0), {str(number): replica_number(str(number)) for number in range(300)})
    assert sum(sent[each] for each in order[:21]) >= 32


def test_between_reports_others_change_as_this_router_does() -> None:
    index = ReplicaIndex(Random(1))
    index.update(state("a"))
    index.update(state("b"))
    for _ in range(2):
        index.sent("a", NAMESPACE, key(0))
        index.sent("b", NAMESPACE, key(0))
    index.update(state("a", 6))
    index.update(state("b", 6))
    assert estimate(index, "a") == 6
    index.sent("a", NAMESPACE, key(0))
    assert estimate(index, "a") == 8, "of 12 open requests, 5 are this router's"
    index.observe("a", 7)
    index.observe("unknown", 7)
    assert estimate(index, "a") == 7
    index.update(state("a", 1))
    assert estimate(index, "a") == 3, "its own ones are certain"
    for _ in range(3):
        index.ended("a", NAMESPACE, key(0))
    assert estimate(index, "a") == 0


def test_one_request_of_a_quiet_router_neither_fills_nor_empties_a_replica() -> None:
    index = ReplicaIndex(Random(1))
    for number in range(20):
        index.update(state(str(number), 50))
    index.sent("0", NAMESPACE, key(0))
    assert estimate(index, "0") == 50 + MAX_ROUTERS, "not 50 and the 1000 open requests of all"
    index.observe("0", 51)
    index.ended("0", NAMESPACE, key(0))
    assert estimate(index, "0") == 51 - MAX_ROUTERS


def test_requests_of_a_replica_that_left_and_came_back_still_end() -> None:
    index = fleet(2)
    index.sent("1", NAMESPACE, None)
    index.remove("1")
    index.update(state("1"))
    assert estimate(index, "1") == 1
    index.ended("1", NAMESPACE, None)
    assert estimate(index, "1") == 0


def estimate(index: ReplicaIndex, replica_id: str) -> int:
    return index.open_requests(replica_id)
