"""One request of a gateway: it is sent to a replica, to another one if the first has not begun it, and its events are read.

Invariant: its deadlines count from when the gateway has it. Each hop gets what is left, and the times until its first token
and in total end here in any case.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast
from uuid import UUID

import structlog
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from loraplex.engine.errors import (
    EngineDraining,
    EngineError,
    EngineLost,
    EngineOverloaded,
    EngineUnavailable,
    RequestTimeout,
)
from loraplex.engine.messages import DeadlineKind, EngineRequest, Event, Failed
from loraplex.platform.engines.event_buffer import EventBuffer, EventBufferConfig
from loraplex.platform.engines.prefix_index import prompt_prefixes
from loraplex.platform.engines.remote_client import unavailable
from loraplex.platform.ray.messages import (
    WAITED,
    Accepted,
    Placing,
    Submission,
    decode_reply,
    encode,
    never_run,
)
from loraplex.platform.ray.replica_set import ReplicaSet

ATTEMPTS: Final = 2
ENDING_S: Final = 2.0
"""How long a request whose time is over is waited for, which ends it with its usage."""
LOG: Final = structlog.get_logger("loraplex.ray")


class _Refused(Exception):
    """No engine began the request; another replica may."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RoutedRequest:
    """A request with its reader's `buffer`. `replica_id` has it; `ended` is set once nothing of it runs any more.

    `abort` is called with this request where it is to end early.
    """

    def __init__(
        self,
        request: EngineRequest,
        buffer: EventBufferConfig,
        replicas: ReplicaSet,
        abort: "Callable[[RoutedRequest], None]",
    ) -> None:
        self.request = request
        self.buffer = EventBuffer(len(request.open_choices), buffer)
        self.ended = asyncio.Event()
        self.replica_id: str | None = None
        self.is_aborted = False
        self._since = time.monotonic()
        self._has_begun = False
        self._replicas = replicas
        self._abort = abort
        self._response: DeploymentResponseGenerator[Any] | None = None

    def cancel(self) -> None:
        """Cancel the call, wherever it is; the request ends without its usage."""
        if self._response is not None:
            self._response.cancel()  # type: ignore[no-untyped-call]

    async def run(self, handle: "DeploymentHandle[Any]", tenant_of: Callable[[Path], UUID | None]) -> None:
        """Run the request to its end. `tenant_of`: see `RayEngine`."""
        timers = [
            asyncio.get_running_loop().call_later(seconds, self._expire, kind)
            for kind, seconds in self._left().items()
            if kind != "queue_timeout_s"
        ]
        try:
            await self._run(handle, tenant_of)
        except asyncio.CancelledError:
            # Of the call that was aborted before a replica had it, or of this task at the end of the client.
            self._put_never_run()
        except Exception as error:
            LOG.exception("request failed", request_id=self.request.request_id)
            self._fail(EngineError.code, f"internal error: {type(error).__name__}")
        finally:
            for timer in timers:
                timer.cancel()
            self.buffer.end()
            if not self.buffer.ended:
                self.buffer.put(lost(self.request.request_id, "its stream ended early"))
            self.ended.set()

    async def _run(self, handle: "DeploymentHandle[Any]", tenant_of: Callable[[Path], UUID | None]) -> None:
        avoid = self._replicas.not_ready()
        failure = unavailable(self.request.request_id, "no engine replica took the request")
        for _ in range(ATTEMPTS):
            if self.is_aborted or self.buffer.ended:
                break
            try:
                await self._stream(handle, self._arguments(tenant_of, avoid))
                return
            except _Refused as refusal:
                failure = refusal.failure
                avoid = [*avoid, *filter(None, [self.replica_id])]
        if self.is_aborted:
            self._put_never_run()
        else:
            self.buffer.put(failure)

    async def _stream(self, handle: "DeploymentHandle[Any]", arguments: tuple[bytes, bytes]) -> None:
        """Read one replica's replies. Raises `_Refused` while no engine has begun the request."""
        self.replica_id = None
        sent = handle.remote(*arguments, **{WAITED: 0.0})
        response = self._response = cast("DeploymentResponseGenerator[Any]", sent)
        try:
            async with asyncio.timeout(self._left().get("queue_timeout_s")) as waiting:
                async for encoded in response:
                    reply = decode_reply(encoded)
                    if isinstance(reply, Accepted):
                        waiting.reschedule(None)
                        self.replica_id = reply.replica_id
                        continue
                    if not self._has_begun and _is_refusal(reply[0]):
                        raise _Refused(reply[0])  # type: ignore[arg-type]  # it is a `Failed`
                    self._has_begun = True
                    self._deliver(reply)
        except TimeoutError:
            self.cancel()
            reason = "no engine replica was free within the request's `queue_timeout_s`; try again later"
            self._fail(EngineOverloaded.code, reason)
        except (RayError, RayServeException) as error:
            self._end_with(error)

    def _arguments(self, tenant_of: Callable[[Path], UUID | None], avoid: list[str]) -> tuple[bytes, bytes]:
        request, adapter, tenant_id = self.request, self.request.adapter, None
        if adapter is not None:
            tenant_id = tenant_of(Path(adapter.blob_path))
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
            since=self._since,
        )
        return encode(Submission(request=request, tenant_id=tenant_id)), encode(placing)

    def _left(self) -> dict[DeadlineKind, float]:
        return self.request.shortened(time.monotonic() - self._since).timeouts

    def _expire(self, kind: DeadlineKind) -> None:
        """A time is over: abort the request, and end it with its usage, or without if that does not come in time."""
        if kind == "first_token_timeout_s" and self._has_begun:
            return
        self._time_out(f"the request's `{kind}` has passed")
        asyncio.get_running_loop().call_later(ENDING_S, self.buffer.end)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Failed) and event.code == EngineLost.code and self.replica_id is not None:
                self._replicas.lost(self.replica_id, self.request)
            if not self.buffer.put(event):
                self._time_out("the response was not read fast enough")

    def _time_out(self, reason: str) -> None:
        """Abort the request, which ends with `timeout` and its usage."""
        self.buffer.fail(Failed(self.request.request_id, RequestTimeout.code, reason))
        self._abort(self)

    def _end_with(self, error: Exception) -> None:
        """End a stream whose call failed, unless its last event has arrived."""
        request_id = self.request.request_id
        if self.buffer.ended:
            return
        if self.is_aborted and self.replica_id is None:
            self._put_never_run()
        elif self.replica_id is None:
            raise _Refused(unavailable(request_id, f"no engine replica: {type(error).__name__}"))
        elif isinstance(error, RayActorError):
            self._replicas.lost(self.replica_id, self.request)
            self.buffer.put(lost(request_id, "its replica ended"))
        elif self.is_aborted:
            self.buffer.put(lost(request_id, "it was aborted on a replica that ends"))
        else:
            LOG.error("an engine replica failed", reason=str(error)[:2000], replica=self.replica_id)
            self.buffer.put(lost(request_id, type(error).__name__))

    def _put_never_run(self) -> None:
        for event in never_run(self.request):
            self.buffer.put(event)

    def _fail(self, code: str, message: str) -> None:
        self.buffer.put(Failed(self.request.request_id, code, message))


def _is_refusal(event: Event) -> bool:
    return isinstance(event, Failed) and event.code in (EngineUnavailable.code, EngineDraining.code)


def lost(request_id: str, reason: str) -> Failed:
    """The end of a request whose engine is gone."""
    return Failed(request_id, EngineLost.code, f"the engine was lost: {reason}")
