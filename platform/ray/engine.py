"""`RayEngine`: the engine replicas of a Ray Serve application as one engine of a gateway.

Invariant: errors arrive as `RemoteEngine` reports them, and a request's deadlines as the engine's own. A request that no engine
has begun is sent once more, to another replica; one whose engine is lost ends with `Failed(engine_lost)`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from loraplex.engine.errors import EngineUnavailable, InvalidRequest
from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    ProbeReport,
)
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.pool import ObservedEngine
from loraplex.platform.engines.remote_client import (
    DRAIN_POLL_S,
    PROBE_TIMEOUT_S,
    shutting_down,
    unavailable,
)
from loraplex.platform.ray.aborts import Aborts
from loraplex.platform.ray.adapter_files import read_files
from loraplex.platform.ray.messages import Placing, ProbeCall, decode_probed, encode
from loraplex.platform.ray.replica_calls import call_living
from loraplex.platform.ray.replica_set import ReplicaSet
from loraplex.platform.ray.routed_request import RoutedRequest, lost
from loraplex.platform.setting_types import RAY_ADDRESS_PREFIX


class RayEngine:
    """A client of all replicas. It implements `ManagedEngine` for them together; `observed` has each.

    `connect` gives it the handle of the deployment's `generate`. `tenant_of` names the tenant of a stored adapter's folder on this machine, None for a folder outside the storage.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        buffer: EventBufferConfig,
        tenant_of: Callable[[Path], UUID | None],
    ) -> None:
        self._generate: DeploymentHandle[Any] | None = None
        self._replicas = replicas
        self._buffer = buffer
        self._tenant_of = tenant_of
        self._calls: dict[str, RoutedRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborts = Aborts(replicas, self._handle, self._spawn)
        self._draining = False
        self.address = RAY_ADDRESS_PREFIX
        self.device: str | None = None

    @property
    def connected(self) -> bool:
        return any(view.connected for view in self._replicas.views.values())

    @property
    def open_requests(self) -> int:
        return sum(not call.buffer.ended for call in self._calls.values())

    @property
    def last_stats(self) -> EngineStats | None:
        return self._replicas.merged_stats()

    @property
    def known_stats(self) -> EngineStats | None:
        return self.last_stats

    @property
    def known_at(self) -> datetime | None:
        return max((view.known_at for view in self._replicas.views.values() if view.known_at), default=None)

    @property
    def restarts(self) -> int:
        return sum(view.restarts for view in self._replicas.views.values())

    @property
    def deaths(self) -> int:
        return sum(view.deaths for view in self._replicas.views.values())

    @property
    def failure(self) -> str | None:
        return None if self.connected else "no engine replica takes requests"

    def silent_for(self) -> float:
        return 0.0

    def observed(self) -> Mapping[int, ObservedEngine]:
        """The replicas by a number that a replacement takes over; this engine itself while there is none."""
        return self._replicas.views or {0: self}

    def connect(self, generate: "DeploymentHandle[Any]") -> None:
        """Use this handle, whose router follows the replicas."""
        self._generate = generate

    def start(self) -> None:
        """Follow the replicas until `close`."""
        self._spawn(self._replicas.follow())

    async def close(self) -> None:
        """Fail all open requests and end this client; the replicas go on."""
        for call in list(self._calls.values()):
            call.buffer.put(lost(call.request.request_id, "the connection is closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def info(self) -> EngineInfo:
        """See `EngineClient.info`; known from the first report on."""
        if self._replicas.info is None:
            raise EngineUnavailable("no engine replica is ready")
        return self._replicas.info

    async def wait_ready(self) -> None:
        """See `EngineClient.wait_ready`: returns with the first replica that takes requests."""
        await self._replicas.wait_for(lambda: self.connected)

    async def stats(self) -> EngineStats:
        """The newest statistics of all replicas: sums of their numbers."""
        stats = self.last_stats
        if stats is None:
            raise EngineUnavailable("no engine replica is connected")
        return stats

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """See `EngineClient.submit`."""
        refusal = self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        call = RoutedRequest(request, self._buffer, self._replicas, self._aborts.begin)
        self._calls[request.request_id] = call
        self._spawn(call.run(self._handle(), self._tenant_of))
        try:
            while not call.buffer.drained():
                yield await call.buffer.get()
        finally:
            if not call.ended.is_set() and not call.buffer.ended:
                self._aborts.begin(call)
            del self._calls[request.request_id]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`; an id that this gateway does not know is aborted on every replica."""
        call = self._calls.get(request_id)
        if call is None:
            await self._aborts.send_unknown(request_id)
            return
        self._aborts.begin(call)
        await call.ended.wait()

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """See `EngineClient.probe`. The files of an adapter that is not stored yet travel with the call."""
        if self._draining or not self.connected:
            raise EngineUnavailable("no engine replica is connected")
        placing = Placing(namespace=adapter.namespace, adapter=adapter.digest)
        arguments = await self._probe_arguments(adapter)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                encoded = (
                    await self._handle()
                    .options(method_name="probe", stream=False)
                    .remote(arguments[0], encode(placing), *arguments[1:])
                )
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineUnavailable(f"the adapter was not probed: {type(error).__name__}") from None
        probed = decode_probed(encoded)
        if probed.lost_by is not None:
            self._replicas.lost(probed.lost_by, adapter)
        if probed.report is None:
            raise EngineUnavailable(probed.message)
        return probed.report

    async def forget(self, namespace: bytes) -> None:
        """See `EngineClient.forget`: returns once every living replica has, also those that drain."""
        await call_living(self._handle(), "forget", namespace)

    async def drain(self) -> None:
        """Refuse new requests of this gateway and wait for its open ones; other gateways are not affected."""
        self._draining = True
        while self._calls:
            await asyncio.sleep(DRAIN_POLL_S)

    def fail_open(self, reason: str) -> None:
        """Abort every open request; it ends with `Failed(server_shutting_down)` once its replica has ended it."""
        for call in self._calls.values():
            if not call.buffer.ended:
                call.buffer.fail(shutting_down(call.request.request_id, reason))
                self._aborts.begin(call)

    def _refusal(self, request: EngineRequest) -> Failed | None:
        request_id = request.request_id
        if self._draining:
            return shutting_down(request_id, "the server is shutting down")
        if self._generate is None:
            return unavailable(request_id, "the Ray cluster has not been joined yet")
        if request_id in self._calls:
            return Failed(request_id, InvalidRequest.code, "`request_id` is in use", "request_id")
        return None

    def _handle(self) -> "DeploymentHandle[Any]":
        if self._generate is None:
            raise EngineUnavailable("the Ray cluster has not been joined yet")
        return self._generate

    async def _probe_arguments(self, adapter: AdapterRef) -> tuple[bytes, ...]:
        folder = Path(adapter.blob_path)
        tenant_id = self._tenant_of(folder)
        if tenant_id is not None:
            return (encode(ProbeCall(adapter=adapter, tenant_id=tenant_id)),)
        config, weights = await asyncio.to_thread(read_files, folder)
        return encode(ProbeCall(adapter=adapter, config=config)), weights

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
