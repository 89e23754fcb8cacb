"""Chooses the replica of a request by what a router knows of the replicas: adapters in memory, prefixes, load, and a home.

Pure: no clock, no random numbers, no input or output. Invariant: of two replicas, one that has its bounded share of the open
requests (bounded loads, Mirrokni et al., SODA 2018) is never before one that has not.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import nlargest
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from loraplex.engine.messages import AdapterKey, EngineStats

SPILL_FACTOR: Final = 1.25

ON_DEVICE: Final = 1.0
IN_HOST_MEMORY: Final = 0.7
ROOM: Final = {"free": 0.6, "evictable": 0.3, "none": 0.0}
"""Scores of an adapter that the replica has to read, by what it takes to make room for it."""

HOME: Final = 0.35
SPARE: Final = 0.2
BASE_HOME: Final = 0.1
"""The home outweighs room elsewhere, so that first requests that come at once do not load an adapter everywhere; an adapter in the
memory of another replica outweighs the home. The base model is everywhere: its home gathers prompts that begin alike, no more."""

PREFIX_WEIGHT: Final = 0.3
LOAD_WEIGHT: Final = 0.9

FULL_LOAD: Final = 0.9
"""From this share of its rows on, a replica counts as full: what a router knows of its load is up to a second old."""

TIE_BREAK: Final = 0.001
ASSUMED_ROWS: Final = 64
PRIME: Final = 2**31 - 1

AdapterRoom: TypeAlias = Literal["free", "evictable", "none"]


class ReplicaState(msgspec.Struct, kw_only=True):
    """What a router knows of one replica. `replica_id` is stable while the replica lives, and ranks it for each adapter.

    `capacity`: rows of its batch, at least 1. `open_requests`: running and waiting there. `device` and `host`: keys of the
    adapters in its memories (`AdapterRef.key`). `room`: what it takes to load one more to the device.
    """

    replica_id: str
    capacity: int
    open_requests: int = 0
    device: frozenset[AdapterKey] = frozenset()
    host: frozenset[AdapterKey] = frozenset()
    room: AdapterRoom = "free"


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks of its replica. `adapter` is None for the base model.

    `prefix_shares`: by replica, the share of the prompt, 0 to 1, that its prefix cache probably has. `homes`: how many
    replicas are the adapter's home; a hot adapter has several.
    """

    namespace: bytes
    adapter: AdapterKey | None = None
    prefix_shares: Mapping[str, float] = {}
    homes: int = 1

    @property
    def home_key(self) -> AdapterKey:
        """What has the home: the adapter, or the tenant for the base model."""
        return self.adapter or (self.namespace, "")


class FleetLoad(NamedTuple):
    """Open requests and rows of all replicas, of which a router may rank a few.

    `quiet_load`: a replica with a smaller part of its rows in use is not compared with the mean.
    """

    open_requests: int
    capacity: int
    quiet_load: float = 0.0


def replica_state(replica_id: str, stats: EngineStats, open_requests: int) -> ReplicaState:
    """Read a replica's state from its statistics; `ASSUMED_ROWS` where they do not say how large its batch is."""
    return ReplicaState(
        replica_id=replica_id,
        capacity=stats.max_running or ASSUMED_ROWS,
        open_requests=open_requests,
        device=frozenset(stats.device_adapters),
        host=frozenset(stats.host_adapters),
        room=_room(stats),
    )


def score(state: ReplicaState, request: PlacementRequest, *, home: float = 0.0) -> float:
    """How well the replica suits the request; more is better. Below 0 it is full, and the score says how far.

    `home`: what it adds that the replica is the adapter's home (`HOME`), or the next one (`SPARE`).
    """
    load = state.open_requests / state.capacity
    memory = _residency(state, request.adapter) + home
    memory += PREFIX_WEIGHT * request.prefix_shares.get(state.replica_id, 0.0)
    if load >= FULL_LOAD:
        return memory * TIE_BREAK - load
    return 1.0 + memory - LOAD_WEIGHT * load


def rank(
    states: Sequence[ReplicaState], request: PlacementRequest, fleet: FleetLoad | None = None
) -> list[str]:
    """The ids of `states`, best first. Replicas that have their share come last, the least loaded of them first.

    `fleet` is the load of all replicas where `states` are some of them. A replica that leaves changes the order of others only
    for adapters that had it as a home or as the next one.
    """
    fleet = fleet or FleetLoad(
        sum(each.open_requests for each in states), sum(each.capacity for each in states)
    )
    order = rendezvous(
        request.home_key, {each.replica_id: replica_number(each.replica_id) for each in states}
    )
    places = {replica_id: place for place, replica_id in enumerate(order)}

    def sort_key(state: ReplicaState) -> tuple[bool, float, int]:
        place = places[state.replica_id]
        if has_share(state, fleet):
            return True, state.open_requests / state.capacity, place
        home = HOME if place < request.homes else SPARE if place == request.homes else 0.0
        if request.adapter is None:
            home = min(home, BASE_HOME)
        return False, -score(state, request, home=home), place

    return [state.replica_id for state in sorted(states, key=sort_key)]


def has_share(state: ReplicaState, fleet: FleetLoad) -> bool:
    """Whether the replica has its share of the open requests, with the next one: `SPILL_FACTOR` of the mean by capacity."""
    share = SPILL_FACTOR * (fleet.open_requests + 1) * state.capacity / fleet.capacity
    return state.open_requests >= max(math.ceil(share), fleet.quiet_load * state.capacity)


def rendezvous(key: AdapterKey, replicas: Mapping[str, int], first: int | None = None) -> list[str]:
    """Ids in the order of an adapter (highest random weight, Thaler and Ravishankar): all, or the `first` ones.

    `replicas`: the `replica_number` of each id. The order of two replicas does not depend on the others.
    """
    number = key_number(key)
    weights = zip([number * each % PRIME for each in replicas.values()], replicas, strict=True)
    ranked = sorted(weights, reverse=True) if first is None else nlargest(first, weights)
    return [replica_id for _, replica_id in ranked]


def key_number(key: AdapterKey) -> int:
    """What stands for an adapter in `rendezvous`: the weight of a replica is the product of both numbers modulo `PRIME`."""
    return _number(key[0] + key[1].encode(), b"adapter")


@lru_cache(maxsize=8192)
def replica_number(replica_id: str) -> int:
    """What stands for a replica in `rendezvous`."""
    return _number(replica_id.encode(), b"replica")


def _residency(state: ReplicaState, adapter: AdapterKey | None) -> float:
    if adapter is None or adapter in state.device:
        return ON_DEVICE
    return IN_HOST_MEMORY if adapter in state.host else ROOM[state.room]


def _room(stats: EngineStats) -> AdapterRoom:
    """By the mean size of its adapters, since a router does not know the size of one that no replica has."""
    resident = len(stats.device_adapters)
    mean = stats.adapter_bytes / resident if resident else 0.0
    if stats.adapter_bytes + mean <= stats.adapter_budget_bytes:
        return "free"
    return "evictable" if stats.pinned_adapters < resident else "none"


def _number(data: bytes, kind: bytes) -> int:
    """From 1 to `PRIME` - 1: products of two are then spread evenly modulo `PRIME`."""
    return int.from_bytes(blake2b(data, digest_size=16, person=kind).digest(), "big") % (PRIME - 1) + 1
