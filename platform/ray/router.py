"""The request router of the engine replicas: it runs in each gateway's process and ranks the replicas by a `ReplicaIndex`.

Invariant: it reserves nothing on a replica, so a gateway that dies leaves nothing behind. Ray calls all of it on one thread.
"""

import asyncio
import time
from contextlib import suppress
from random import Random
from typing import Any, Final, NamedTuple

from ray.exceptions import RayError
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from loraplex.engine.messages import AdapterKey, EngineStats
from loraplex.platform.engines.placement import replica_state
from loraplex.platform.engines.replica_index import ReplicaIndex
from loraplex.platform.ray.messages import WAITED, Placing, ReplicaReport, decode_placing, decode_report
from loraplex.platform.ray.replica_directory import ReplicaDirectory, directory_of

REPORT: Final = "report"
"""Key of the encoded `ReplicaReport` in a replica's routing statistics."""

CONTROL_CALLS: Final = 16
"""Of a replica's ongoing requests, as many are left free of streams: Serve makes aborts and deletions wait for a place as well."""
RECOUNT_S: Final = 0.05
MAX_RECOUNT_S: Final = 0.8
"""A full replica is asked how full it is after `RECOUNT_S`, then after twice as long, up to this. Its reports come in between."""
CHOSEN_S: Final = 1.0
"""A request that was sent nowhere for so long after its choice was cancelled."""


class _Sent(NamedTuple):
    """Where a request was sent, and when it was chosen."""

    replica: str
    namespace: bytes
    adapter: AdapterKey | None
    at: float


class _Probe(NamedTuple):
    """When a full replica was last asked, and the seconds until it is asked again."""

    at: float
    pause_s: float


class PlacementRouter(RequestRouter):
    """Ranks the replicas for each request by its `Placing`, the second argument of every routed call."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._index = ReplicaIndex(Random())
        self._reports: dict[str, ReplicaReport | None] = {}
        self._encoded: dict[str, bytes] = {}
        self._chosen: dict[str, _Sent] = {}
        self._accepted: dict[str, _Sent] = {}
        self._asked: dict[str, _Probe] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._directory: ReplicaDirectory = directory_of(self._deployment_id.app_name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Read the replicas' newest reports, and publish them to this process."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        for name in self._reports.keys() - names:
            self._forget(name)
        for replica in replicas:
            self._read(replica.replica_id.unique_id, replica.routing_stats.get(REPORT))
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica whose process has died, before the controller notices."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)
        self._publish()

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Take over the load that a replica sends with each answer."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._index.observe(replica_id.unique_id, num_ongoing_requests)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the best candidates: each is a rank of its own, so that the next is asked only if the one before is full."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it, Serve would ask full replicas again and again without a pause.
        pending_request.routing_context.should_backoff = True
        placing = decode_placing(pending_request.args[1])
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request_id = pending_request.metadata.internal_request_id
        self._end(self._chosen.pop(request_id, None))
        self._end_cancelled()
        with_places = {name: replica for name, replica in by_name.items() if self._has_place(replica)}
        if not with_places:
            return []  # Serve asks again after a pause
        order = self._order(placing, with_places)
        self._chosen[request_id] = self._begin(order[0], placing)
        if WAITED in pending_request.kwargs:
            pending_request.kwargs[WAITED] = time.monotonic() - placing.since
        return [[by_name[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Count the request where it was accepted."""
        request_id = pending_request.metadata.internal_request_id
        sent = self._chosen.pop(request_id, None)
        if sent is None or sent.replica != replica_id.unique_id:
            self._end(sent)
            sent = self._begin(replica_id.unique_id, decode_placing(pending_request.args[1]))
        self._accepted[request_id] = sent

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request. Serve also calls it for one that the replica refused."""
        self._end(self._accepted.pop(internal_request_id, None))

    def _order(self, placing: Placing, candidates: dict[str, RunningReplica]) -> list[str]:
        """Those that take requests and are not to be avoided; where none is left, all, those with fewer requests first."""
        best = self._index.choose(placing.namespace, _adapter(placing), placing.prefixes)
        usable = [name for name in best if name in candidates and name not in placing.avoid]
        others = [name for name in candidates if name not in placing.avoid] or list(candidates)
        return usable or sorted(others, key=self._index.open_requests)

    def _has_place(self, replica: RunningReplica) -> bool:
        places = max(1, replica.max_ongoing_requests - CONTROL_CALLS)
        if self._index.open_requests(replica.replica_id.unique_id) < places:
            self._asked.pop(replica.replica_id.unique_id, None)
            return True
        self._recount(replica)
        return False

    def _recount(self, replica: RunningReplica) -> None:
        """Ask a full replica what it has: what other gateways' requests have freed is not counted here."""
        name, now = replica.replica_id.unique_id, time.monotonic()
        asked = self._asked.get(name)
        if asked is None or now - asked.at >= asked.pause_s:
            pause_s = RECOUNT_S if asked is None else min(2 * asked.pause_s, MAX_RECOUNT_S)
            self._asked[name] = _Probe(now, pause_s)
            task = asyncio.get_running_loop().create_task(self._ask(replica))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, replica: RunningReplica) -> None:
        # A dead replica leaves the list by itself. Ray gets the deadline, and does not keep it.
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(MAX_RECOUNT_S):
                count = await replica.get_queue_len(deadline_s=MAX_RECOUNT_S)
            self.on_new_queue_len_info(replica.replica_id, count)

    def _begin(self, replica: str, placing: Placing) -> _Sent:
        adapter = _adapter(placing)
        self._index.sent(replica, placing.namespace, adapter, placing.prefixes)
        return _Sent(replica, placing.namespace, adapter, time.monotonic())

    def _end(self, sent: _Sent | None) -> None:
        if sent is not None:
            self._index.ended(sent.replica, sent.namespace, sent.adapter)

    def _end_cancelled(self) -> None:
        now = time.monotonic()
        while self._chosen and now - next(iter(self._chosen.values())).at > CHOSEN_S:
            self._end(self._chosen.pop(next(iter(self._chosen))))

    def _read(self, name: str, encoded: bytes | None) -> None:
        """Decode a report once, since it names each adapter in memory. A replica without a running engine is no candidate."""
        if name in self._reports and (encoded is None or encoded == self._encoded.get(name)):
            return
        report = None if encoded is None else decode_report(encoded)
        self._reports[name] = report
        if encoded is not None:
            self._encoded[name] = encoded
        stats = EngineStats() if report is None else report.stats
        if stats is None or stats.draining:
            self._index.remove(name)
        else:
            self._index.update(replica_state(name, stats, stats.running + stats.waiting))

    def _forget(self, name: str) -> None:
        self._index.remove(name)
        self._reports.pop(name, None)
        self._encoded.pop(name, None)
        self._asked.pop(name, None)

    def _publish(self) -> None:
        self._directory.reports = dict(self._reports)


def _adapter(placing: Placing) -> AdapterKey | None:
    return None if placing.adapter is None else (placing.namespace, placing.adapter)
