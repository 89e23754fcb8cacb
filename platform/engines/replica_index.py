"""What one router knows of all replicas, indexed so that a decision looks at a few of a thousand: homes, replicas that have the
adapter or the prefix, and some at random. Invariant: the load of a replica is what others have there by its newest report, and
what this router has there now.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from loraplex.engine.messages import AdapterKey
from loraplex.platform.engines.placement import (
    PRIME,
    FleetLoad,
    PlacementRequest,
    ReplicaState,
    key_number,
    rank,
    replica_number,
)
from loraplex.platform.engines.prefix_index import PrefixIndex, PromptPrefix

if TYPE_CHECKING:
    import numpy as np

Counted = TypeVar("Counted")

SAMPLED_HOMES: Final = 4
SAMPLED_HOLDERS: Final = 4
SAMPLED_REPLICAS: Final = 2
RANKED_WHOLE: Final = 8
"""A fleet up to this size is ranked whole."""

SPARE_HOMES: Final = 1
"""Replicas after the homes that are candidates: where the requests go that the homes have no room for."""

QUIET_LOAD: Final = 0.25
"""The share of its rows that a home gives to one adapter, before it gets another home; see also `FleetLoad`. A batch of few rows
takes one more at nearly no cost, and another replica would have to load the adapter."""

MAX_ROUTERS: Final = 16
"""A router with few requests cannot tell from its own how many others have: it counts at most as if there were so many routers."""

MAX_RANKINGS: Final = 32_768
PREFIX_BYTES: Final = 64 * 2**20


class ReplicaIndex:
    """Chooses replicas by `rank`. `random` picks those candidates that are no home of the adapter. Not for several threads."""

    def __init__(self, random: Random, prefix_bytes: int = PREFIX_BYTES) -> None:
        self._random = random
        self._replicas: dict[str, ReplicaState] = {}
        self._ids: list[str] = []
        self._numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
        self._holders: dict[AdapterKey, dict[str, None]] = {}
        self._rankings: OrderedDict[AdapterKey, list[str]] = OrderedDict()
        self._own_by_replica: Counter[str] = Counter()
        self._reported: dict[str, tuple[int, int]] = {}
        self._own_by_key: Counter[AdapterKey] = Counter()
        self._own = self._open = self._capacity = 0
        self._prefixes = PrefixIndex(prefix_bytes)

    def __len__(self) -> int:
        return len(self._replicas)

    def update(self, state: ReplicaState) -> None:
        """Take over what a replica reports, with this router's requests in its load. One that is not known joins."""
        before = self._replicas.get(state.replica_id)
        own = self._own_by_replica[state.replica_id]
        state.open_requests = max(state.open_requests, own)
        self._reported[state.replica_id] = state.open_requests, own
        self._replicas[state.replica_id] = state
        self._count(state, 1)
        if before is None:
            self._change_holders(state.replica_id, frozenset(), state.device)
            self._members_changed()
            return
        self._count(before, -1)
        if (before.device,) != (state.device,):
            self._change_holders(state.replica_id, before.device, state.device)

    def observe(self, replica_id: str, open_requests: int) -> None:
        """Take over the load that a replica reports between its states; an unknown one is none."""
        state = self._replicas.get(replica_id)
        if state is not None:
            self._count(state, -1)
            own = self._own_by_replica[replica_id]
            state.open_requests = max(open_requests, own)
            self._reported[replica_id] = state.open_requests, own
            self._count(state, 1)

    def remove(self, replica_id: str) -> None:
        """Forget a replica; an unknown one is none. Its requests that are open still end by `ended`."""
        state = self._replicas.pop(replica_id, None)
        if state is not None:
            del self._reported[replica_id]
            self._count(state, -1)
            self._change_holders(replica_id, state.device, frozenset())
            self._members_changed()

    def open_requests(self, replica_id: str) -> int:
        """The estimated open requests of a replica now; of an unknown one those of this router."""
        state = self._replicas.get(replica_id)
        return self._own_by_replica[replica_id] if state is None else state.open_requests

    def choose(
        self, namespace: bytes, adapter: AdapterKey | None, prefixes: Sequence[PromptPrefix] = ()
    ) -> list[str]:
        """Candidates for a request, best first; see `rank`. Empty without replicas."""
        if not self._replicas:
            return []
        shares = self._prefixes.shares(namespace, prefixes)
        homes, others = self._candidates(adapter or (namespace, ""), shares)
        states = [self._replicas[each] for each in dict.fromkeys((*homes, *others))]
        request = PlacementRequest(
            namespace=namespace, adapter=adapter, prefix_shares=shares, homes=len(homes)
        )
        return rank(states, request, FleetLoad(self._open, self._capacity, QUIET_LOAD))

    def sent(
        self,
        replica_id: str,
        namespace: bytes,
        adapter: AdapterKey | None,
        prefixes: Sequence[PromptPrefix] = (),
    ) -> None:
        """Count a request that goes to a replica, and remember its prefixes there."""
        self._prefixes.record(namespace, prefixes, replica_id)
        self._add(replica_id, adapter or (namespace, ""), 1)

    def ended(self, replica_id: str, namespace: bytes, adapter: AdapterKey | None) -> None:
        """Count the end of a request that was `sent`."""
        self._add(replica_id, adapter or (namespace, ""), -1)

    def _candidates(self, key: AdapterKey, shares: Iterable[str]) -> tuple[list[str], list[str]]:
        """The homes, or some of many, and other candidates."""
        count = self._home_count(key)
        ranking = self._ranking(key, count + SPARE_HOMES)
        homes, spare = ranking[:count], ranking[count : count + SPARE_HOMES]
        if count > SAMPLED_HOMES:
            homes = self._random.sample(homes, SAMPLED_HOMES)
        holders = islice(self._holders.get(key, ()), SAMPLED_HOLDERS)
        sampled = self._ids
        if len(sampled) > RANKED_WHOLE:
            sampled = [self._random.choice(self._ids) for _ in range(SAMPLED_REPLICAS)]
        return homes, [*spare, *holders, *(each for each in shares if each in self._replicas), *sampled]

    def _home_count(self, key: AdapterKey) -> int:
        """By the open requests of the adapter, which other routers have as many of, for their part of all."""
        own = self._own_by_key[key]
        if not own:
            return 1
        everywhere = own * self._routers()
        rows_of_home = QUIET_LOAD * self._capacity / len(self._replicas)
        return min(1 + int(everywhere / rows_of_home), len(self._replicas))

    def _ranking(self, key: AdapterKey, first: int) -> list[str]:
        known = self._rankings.get(key)
        if known is None or len(known) < min(first, len(self._ids)):
            known = self._rankings[key] = self._rank_all(key, 2 * first)
            if len(self._rankings) > MAX_RANKINGS:
                self._rankings.popitem(last=False)
        else:
            self._rankings.move_to_end(key)
        return known

    def _rank_all(self, key: AdapterKey, first: int) -> list[str]:
        """The order of `rendezvous`, for thousands of replicas in microseconds. Equal weights of two replicas may swap them."""
        import numpy as np

        weights = self._numbers * key_number(key) % PRIME
        first = min(first, len(weights))
        best = np.argpartition(weights, -first)[-first:]
        return [self._ids[each] for each in best[np.argsort(-weights[best])]]

    def _add(self, replica_id: str, key: AdapterKey, change: int) -> None:
        self._own += change
        _add(self._own_by_replica, replica_id, change)
        _add(self._own_by_key, key, change)
        state = self._replicas.get(replica_id)
        if state is not None:
            before = state.open_requests
            state.open_requests = self._estimate(replica_id)
            self._open += state.open_requests - before

    def _estimate(self, replica_id: str) -> int:
        """Its open requests now: what changed of this router's since the report also changed of the others', in proportion."""
        reported, own_then = self._reported[replica_id]
        own = self._own_by_replica[replica_id]
        return max(own, reported + round((own - own_then) * self._routers()))

    def _routers(self) -> float:
        """How many routers there are, as all open requests are to this one's."""
        return min(self._open / max(self._own, 1), MAX_ROUTERS)

    def _count(self, state: ReplicaState, sign: int) -> None:
        self._open += sign * state.open_requests
        self._capacity += sign * state.capacity

    def _change_holders(
        self, replica_id: str, before: frozenset[AdapterKey], after: frozenset[AdapterKey]
    ) -> None:
        for key in before - after:
            holders = self._holders[key]
            del holders[replica_id]
            if not holders:
                del self._holders[key]
        for key in after - before:
            self._holders.setdefault(key, {})[replica_id] = None

    def _members_changed(self) -> None:
        self._ids = list(self._replicas)
        import numpy as np  # not by a gateway that starts, before its engine

        self._numbers = np.array([replica_number(each) for each in self._ids], dtype=np.int64)
        self._rankings.clear()


def _add(counts: Counter[Counted], counted: Counted, change: int) -> None:
    counts[counted] += change
    if not counts[counted]:
        del counts[counted]
