"""The policies that are compared: the product's own `ReplicaIndex`, and four without what it knows.

Invariant: each knows a replica's load as the product does, by its newest report and this router's own requests since.
"""

from bisect import bisect
from hashlib import blake2b
from random import Random
from typing import Final

import numpy as np
from tests.benchmarks.placement.fleet import Replica
from tests.benchmarks.placement.traffic import FleetShape, Traffic

from loraplex.engine.messages import AdapterKey
from loraplex.platform.engines.placement import SPILL_FACTOR, ReplicaState
from loraplex.platform.engines.prefix_index import PromptPrefix
from loraplex.platform.engines.replica_index import ReplicaIndex

VIRTUAL_NODES: Final = 100


class KnownLoads:
    """Loads by report and by this router's own requests. Chooses at random."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self._random = Random(seed)
        self._loads = np.zeros(shape.replicas)
        self._own = [0] * shape.replicas
        self._reports = [(0, 0)] * shape.replicas
        self._own_total = 0
        self._total = 0.0

    def choose(self, adapter: int, prefix: int, share: float) -> int:
        return self._random.randrange(len(self._own))

    def sent(self, replica: int, adapter: int, prefix: int, share: float) -> None:
        self._change(replica, 1)

    def ended(self, replica: int, adapter: int) -> None:
        self._change(replica, -1)

    def report(self, replica: Replica) -> None:
        own = self._own[replica.number]
        self._reports[replica.number] = (replica.open_requests, own)
        self._set(replica.number, max(replica.open_requests, own))

    def _change(self, replica: int, change: int) -> None:
        """What changed of this router's requests since the report also changed of the others', in proportion."""
        self._own[replica] += change
        self._own_total += change
        reported, own_then = self._reports[replica]
        others = (self._own[replica] - own_then) * self._total / max(self._own_total, 1)
        self._set(replica, max(self._own[replica], reported + round(others)))

    def _set(self, replica: int, load: int) -> None:
        self._total += load - self._loads[replica]
        self._loads[replica] = load


class LeastLoaded(KnownLoads):
    """The replica with the fewest open requests, one of them at random."""

    def choose(self, adapter: int, prefix: int, share: float) -> int:
        least = np.flatnonzero(self._loads == self._loads.min())
        return int(least[self._random.randrange(len(least))])


class ConsistentHash(KnownLoads):
    """The first replica after the adapter on a ring; `bounded`: the first one that has less than its share of the requests."""

    def __init__(self, shape: FleetShape, seed: int, *, bounded: bool) -> None:
        super().__init__(shape, seed)
        self._bounded = bounded
        nodes = ((b"%d-%d" % (i, j), i) for i in range(shape.replicas) for j in range(VIRTUAL_NODES))
        self._ring = sorted((_position(name), replica) for name, replica in nodes)
        self._positions = [position for position, _ in self._ring]
        self._starts = [bisect(self._positions, _position(b"adapter-%d" % i)) for i in range(shape.adapters)]

    def choose(self, adapter: int, prefix: int, share: float) -> int:
        place, ring = self._starts[adapter], self._ring
        bound = SPILL_FACTOR * (self._total + 1) / len(self._own)
        while True:
            replica = ring[place % len(ring)][1]
            if not self._bounded or self._loads[replica] < bound:
                return replica
            place += 1


class Memories:
    """What the replicas last reported of their memories, as keys; the routers of a process share it."""

    def __init__(self, traffic: Traffic) -> None:
        self.keys = traffic.keys
        self._known: dict[int, tuple[frozenset[AdapterKey], frozenset[AdapterKey]]] = {}

    def read(self, replica: Replica) -> tuple[frozenset[AdapterKey], frozenset[AdapterKey]]:
        """The adapters of the device and of host memory."""
        if replica.changed or replica.number not in self._known:
            keys = self.keys
            self._known[replica.number] = (
                frozenset([keys[each] for each in replica.device]),
                frozenset([keys[each] for each in replica.host]),
            )
            replica.changed = False
        return self._known[replica.number]


class Product:
    """The product's router: `ReplicaIndex`, whose decisions are those of `rank`."""

    def __init__(self, shape: FleetShape, memories: Memories, seed: int) -> None:
        self._index = ReplicaIndex(Random(seed))
        self._rows = shape.rows
        self._memories = memories
        self._keys = memories.keys

    def choose(self, adapter: int, prefix: int, share: float) -> int:
        key = self._keys[adapter]
        return int(self._index.choose(key[0], key, _prefixes(prefix, share))[0])

    def sent(self, replica: int, adapter: int, prefix: int, share: float) -> None:
        key = self._keys[adapter]
        self._index.sent(str(replica), key[0], key, _prefixes(prefix, share))

    def ended(self, replica: int, adapter: int) -> None:
        key = self._keys[adapter]
        self._index.ended(str(replica), key[0], key)

    def report(self, replica: Replica) -> None:
        device, host = self._memories.read(replica)
        self._index.update(
            ReplicaState(
                replica_id=str(replica.number),
                capacity=self._rows,
                open_requests=replica.open_requests,
                device=device,
                host=host,
                room="evictable",
            )
        )


def _prefixes(prefix: int, share: float) -> list[PromptPrefix]:
    return [PromptPrefix(share, prefix.to_bytes(16, "big"))]


def _position(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")
