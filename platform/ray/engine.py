"""`RayEngine`: the engine replicas of a Ray Serve application as one engine of a gateway.

Invariant: errors arrive as `RemoteEngine` reports them. A request that no engine has begun is sent once more, to another
replica; one whose engine is lost ends with `Failed(engine_lost)`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

import structlog
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from loraplex.engine.errors import (
    EngineError,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    RequestTimeout,
)
from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Failed,
    ProbeReport,
)
from loraplex.platform.engines.event_buffer import EventBuffer, EventBufferConfig
from loraplex.platform.engines.pool import ObservedEngine
from loraplex.platform.engines.prefix_index import prompt_prefixes
from loraplex.platform.engines.remote_client import (
    DRAIN_POLL_S,
    PROBE_TIMEOUT_S,
    shutting_down,
    unavailable,
)
from loraplex.platform.ray.adapter_files import read_files
from loraplex.platform.ray.messages import (
    Accepted,
    Placing,
    ProbeCall,
    Submission,
    decode_probed,
    decode_reply,
    encode,
    never_run,
)
from loraplex.platform.ray.replica_set import ReplicaSet

ATTEMPTS: Final = 2
ABORT_INTERVAL_S: Final = 0.5
ABORT_BATCH_S: Final = 0.005
CONTROL_TIMEOUT_S: Final = 10.0
LOG: Final = structlog.get_logger("loraplex.ray")


class _Refused(Exception):
    """No engine began the request; another replica may."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Call:
    """One request: where it runs, and its reader's buffer. `ended` once nothing of it runs any more."""

    def __init__(self, request: EngineRequest, buffer: EventBufferConfig) -> None:
        self.request = request
        self.buffer = EventBuffer(request.sampling.n, buffer)
        self.ended = asyncio.Event()
        self.replica_id: str | None = None
        self.response: DeploymentResponseGenerator[Any] | None = None
        self.is_aborted = False


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
        self._calls: dict[str, _Call] = {}
        self._aborts: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None
        self._draining = False

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
            call.buffer.put(_lost(call.request.request_id, "the connection is closed"))
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
        call = self._calls[request.request_id] = _Call(request, self._buffer)
        self._spawn(self._run(call))
        try:
            while not call.buffer.drained():
                yield await call.buffer.get()
        finally:
            if not call.ended.is_set() and not call.buffer.ended:
                self._begin_abort(call)
            del self._calls[request.request_id]

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`; an id that this gateway does not know is aborted on every replica."""
        call = self._calls.get(request_id)
        if call is None:
            with suppress(EngineUnavailable):
                await self._on_all("abort", [request_id])
            return
        self._begin_abort(call)
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
        """See `EngineClient.forget`: returns once every replica has."""
        await self._on_all("forget", namespace)

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
                self._begin_abort(call)

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

    async def _run(self, call: _Call) -> None:
        """Run a request to its end, on another replica if the first one has not begun it."""
        request_id, avoid = call.request.request_id, self._replicas.not_ready()
        failure = unavailable(request_id, "no engine replica took the request")
        try:
            for _ in range(ATTEMPTS):
                if call.is_aborted or call.buffer.ended:
                    break
                try:
                    await self._stream(call, avoid)
                    return
                except _Refused as refusal:
                    failure = refusal.failure
                    avoid = [*avoid, *filter(None, [call.replica_id])]
            for event in never_run(call.request) if call.is_aborted else [failure]:
                call.buffer.put(event)
        except asyncio.CancelledError:
            # Of the call that was aborted before a replica had it, or of this task at the end of the client.
            for event in never_run(call.request):
                call.buffer.put(event)
        except Exception as error:
            LOG.exception("request failed", request_id=request_id)
            call.buffer.put(Failed(request_id, EngineError.code, f"internal error: {type(error).__name__}"))
        finally:
            call.buffer.end()
            if not call.buffer.ended:
                call.buffer.put(_lost(request_id, "its stream ended early"))
            self._aborts.discard(call)
            call.ended.set()

    async def _stream(self, call: _Call, avoid: list[str]) -> None:
        """Read one replica's replies. Raises `_Refused` while no engine has begun the request."""
        request = call.request
        call.replica_id, is_first = None, True
        sent = self._handle().remote(*self._arguments(request, avoid))
        response = call.response = cast("DeploymentResponseGenerator[Any]", sent)
        try:
            async with asyncio.timeout(request.queue_timeout_s) as waiting:
                async for encoded in response:
                    reply = decode_reply(encoded)
                    if isinstance(reply, Accepted):
                        waiting.reschedule(None)
                        call.replica_id = reply.replica_id
                        continue
                    if is_first and _is_refusal(reply[0]):
                        raise _Refused(reply[0])  # type: ignore[arg-type]  # it is a `Failed`
                    is_first = False
                    self._deliver(call, reply)
        except TimeoutError:
            response.cancel()  # type: ignore[no-untyped-call]
            call.buffer.put(
                Failed(request.request_id, RequestTimeout.code, "no engine replica was free in time")
            )
        except (RayError, RayServeException) as error:
            self._end_with(call, error)

    def _arguments(self, request: EngineRequest, avoid: list[str]) -> tuple[bytes, bytes]:
        adapter, tenant_id = request.adapter, None
        if adapter is not None:
            tenant_id = self._tenant_of(Path(adapter.blob_path))
            request = replace(request, adapter=replace(adapter, blob_path=""))
        placing = Placing(
            namespace=request.namespace,
            adapter=None if adapter is None else adapter.digest,
            prefixes=prompt_prefixes(
                request.namespace,
                None if adapter is None else adapter.key,
                request.cache_salt,
                request.prompt_token_ids,
            ),
            avoid=avoid,
        )
        return encode(Submission(request=request, tenant_id=tenant_id)), encode(placing)

    def _deliver(self, call: _Call, events: list[Event]) -> None:
        request_id = call.request.request_id
        for event in events:
            if isinstance(event, Failed) and event.code == EngineLost.code and call.replica_id is not None:
                self._replicas.lost(call.replica_id, call.request)
            if not call.buffer.put(event):
                message = "the response was not read fast enough"
                call.buffer.fail(Failed(request_id, RequestTimeout.code, message))
                self._begin_abort(call)

    def _end_with(self, call: _Call, error: Exception) -> None:
        """End a stream whose call failed, unless its last event has arrived."""
        request_id = call.request.request_id
        if call.buffer.ended:
            return
        if call.is_aborted and call.replica_id is None:
            for event in never_run(call.request):
                call.buffer.put(event)
        elif call.replica_id is None:
            raise _Refused(unavailable(request_id, f"no engine replica: {type(error).__name__}"))
        elif isinstance(error, RayActorError):
            self._replicas.lost(call.replica_id, call.request)
            call.buffer.put(_lost(request_id, "its replica ended"))
        elif call.is_aborted:
            call.buffer.put(_lost(request_id, "it was aborted on a replica that ends"))
        else:
            LOG.error("an engine replica failed", reason=str(error)[:2000], replica=call.replica_id)
            call.buffer.put(_lost(request_id, type(error).__name__))

    def _begin_abort(self, call: _Call) -> None:
        """Send the abort to the replica until the request has ended there. One that drains is cancelled, without its usage."""
        call.is_aborted = True
        if call.ended.is_set():
            return
        if call.replica_id is None and call.response is not None:
            call.response.cancel()  # type: ignore[no-untyped-call]
        self._aborts.add(call)
        if self._sending is None or self._sending.done():
            self._sending = self._spawn(self._send_aborts())

    async def _send_aborts(self) -> None:
        """Send what is to be aborted to all replicas, together, again and again until it has ended."""
        while self._aborts:
            await asyncio.sleep(ABORT_BATCH_S)
            calls = list(self._aborts)
            if not calls:
                return
            self._cancel_on_leaving(calls)
            self._spawn(self._try_on_all("abort", [call.request.request_id for call in calls]))
            endings = [asyncio.create_task(call.ended.wait()) for call in calls]
            await asyncio.wait(endings, timeout=ABORT_INTERVAL_S)
            for ending in endings:
                ending.cancel()

    def _cancel_on_leaving(self, calls: list[_Call]) -> None:
        """Cancel those on replicas that drain: Serve sends no call to such a replica, but their streams are still open."""
        for call in calls:
            replica_id = call.replica_id
            if call.response is not None and replica_id is not None and not self._replicas.lists(replica_id):
                call.response.cancel()  # type: ignore[no-untyped-call]

    async def _try_on_all(self, method: str, argument: object) -> None:
        with suppress(EngineUnavailable):
            await self._on_all(method, argument)

    async def _on_all(self, method: str, argument: object) -> None:
        """Call a method of every replica. Raises `EngineUnavailable` unless each has ended it or is dead."""
        try:
            results = (
                await self._handle()
                .broadcast(method, argument)
                .results_async(timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True)
            )
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineUnavailable(f"{method}: {type(error).__name__}") from None
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RayActorError):
                raise EngineUnavailable(f"{method}: an engine replica answered {type(result).__name__}")

    async def _probe_arguments(self, adapter: AdapterRef) -> tuple[bytes, ...]:
        folder = Path(adapter.blob_path)
        tenant_id = self._tenant_of(folder)
        if tenant_id is not None:
            return (encode(ProbeCall(adapter=adapter, tenant_id=tenant_id)),)
        config, weights = await asyncio.to_thread(read_files, folder)
        return encode(ProbeCall(adapter=adapter, config=config)), weights

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _is_refusal(event: Event) -> bool:
    return isinstance(event, Failed) and event.code == EngineUnavailable.code


def _lost(request_id: str, reason: str) -> Failed:
    return Failed(request_id, EngineLost.code, f"the engine was lost: {reason}")
