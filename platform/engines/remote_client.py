"""An `EngineClient` over the socket of an engine process, for the gateway that spawned it or for any other gateway.

Invariant: when the engine is lost, every open request gets `Failed(engine_lost)` within seconds. Every abort and forget
is sent again until the engine acknowledges it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeAlias
from uuid import uuid4

import msgspec
import structlog
import zmq

from loraplex.engine.errors import (
    EngineDraining,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    RequestTimeout,
    ServerShuttingDown,
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
from loraplex.platform.engines import wire
from loraplex.platform.engines.event_buffer import DEFAULT_BUFFER, EventBuffer, EventBufferConfig
from loraplex.platform.engines.loop_clock import LoopClock
from loraplex.platform.engines.loop_socket import LoopSocket
from loraplex.platform.engines.poison_memory import Work

STATS_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 300.0
DRAIN_POLL_S = 0.02
HELLO_INTERVAL_S = 0.1
FAREWELL_S = 0.5
RECONNECT_S = 2 * wire.PING_INTERVAL_S
"""How long requests wait for an engine that was lost a moment ago: a gateway that was paused has it back within that time."""

OnDeath: TypeAlias = Callable[[Collection[Work]], None]
"""Receives the requests and probes that were open on an engine process when it died."""


def ignore_death(open_work: Collection[Work]) -> None:
    """The `OnDeath` of a client without a memory of deaths."""


class RemoteEngine:
    """A client of the engine at `address` (`ipc://…`). `start` returns at once; `wait_ready` waits for the engine.

    `silence_s` is how long the engine may leave pings unanswered before it counts as lost. `on_death` is called when
    its process has died, or another one has taken its place. `restarts`, `failure` (why there is no engine now) and `device` are set by
    the process that supervises the engine, and stay 0 and None for an engine of another process.
    """

    def __init__(
        self,
        address: str,
        buffer: EventBufferConfig = DEFAULT_BUFFER,
        silence_s: float = wire.PEER_TIMEOUT_S,
        on_death: OnDeath = ignore_death,
    ) -> None:
        wire.socket_path(address)
        self.address = address
        self._buffer = buffer
        self._silence_s = silence_s
        self._on_death = on_death
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket: LoopSocket | None = None
        self._info: EngineInfo | None = None
        self._ready = asyncio.Event()
        self._instance: str | None = None
        self._streams: dict[str, EventBuffer] = {}
        self._open: dict[str, Work] = {}
        self._lost: dict[str, Work] = {}
        self._aborts: dict[str, asyncio.Event] = {}
        self._forgets: dict[bytes, asyncio.Future[None]] = {}
        self._pongs: dict[int, asyncio.Future[EngineStats]] = {}
        self._probes: dict[str, asyncio.Future[ProbeReport]] = {}
        self._number = 0
        self._clock = LoopClock(wire.PING_INTERVAL_S, time.monotonic())
        self._heard_at = 0.0
        self._reconnect_until = self._may_run_until = 0.0
        self._draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger("loraplex.remote_engine").bind(engine=address)
        self.last_stats: EngineStats | None = None
        self.known_stats: EngineStats | None = None
        self.known_at: datetime | None = None
        self.device: str | None = None
        self.restarts = 0
        self.deaths = 0
        self.failure: str | None = None

    @property
    def connected(self) -> bool:
        """True while the engine responds."""
        return self._ready.is_set()

    @property
    def open_requests(self) -> int:
        """Requests whose last event has not arrived."""
        return sum(not stream.ended for stream in self._streams.values())

    def silent_for(self) -> float:
        """Seconds since the last message of the engine, or since the connection began, in which the event loop ran."""
        return self._clock.time - self._heard_at

    def start(self) -> None:
        """Start to connect, and to reconnect whenever the engine is lost."""
        self._tasks.append(asyncio.create_task(self._tick()))

    async def wait_ready(self) -> None:
        """See `EngineClient.wait_ready`: wait until the engine has sent its `EngineInfo`."""
        await self._ready.wait()

    async def close(self) -> None:
        """Fail all open requests and close the connection."""
        self._reset("the connection is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._disconnect()
        self._context.term()

    def info(self) -> EngineInfo:
        """See `EngineClient.info`; known from `describe` or the first connection on, also while the engine is lost."""
        if self._info is None:
            raise EngineUnavailable("the engine is not ready")
        return self._info

    def describe(self, info: EngineInfo) -> None:
        """Record what the engine will serve. Its parent calls this while the engine starts."""
        self._info = info

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """See `EngineClient.submit`."""
        request_id = request.request_id
        await self._reconnected()
        refusal = self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        stream = self._streams[request_id] = EventBuffer(len(request.open_choices), self._buffer)
        self._open[request_id] = request
        try:
            if not self._send(wire.Submit(request)):
                stream.put(unavailable(request_id, "the engine's queue is full"))
            while not stream.drained():
                yield await stream.get()
        finally:
            del self._streams[request_id], self._open[request_id]
            if not stream.ended:
                self._request_abort(request_id)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`; also returns when the engine is lost, because then nothing runs there."""
        await self._request_abort(request_id).wait()

    async def probe(self, adapter: AdapterRef) -> ProbeReport:
        """See `EngineClient.probe`."""
        if self._draining or not self.connected:
            raise EngineUnavailable("the engine is not connected")
        probe_id = uuid4().hex
        reply: asyncio.Future[ProbeReport] = asyncio.get_running_loop().create_future()
        self._probes[probe_id], self._open[probe_id] = reply, adapter
        try:
            if not self._send(wire.Probe(probe_id, adapter)):
                raise EngineUnavailable("the engine's queue is full")
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await reply
        except TimeoutError:
            raise EngineUnavailable("the engine does not respond") from None
        finally:
            del self._probes[probe_id], self._open[probe_id]

    async def forget(self, namespace: bytes) -> None:
        """See `EngineClient.forget`."""
        if not self.connected:
            raise EngineUnavailable("the engine is not connected")
        forgotten = self._forgets.get(namespace)
        if forgotten is None:
            forgotten = self._forgets[namespace] = asyncio.get_running_loop().create_future()
        self._send(wire.Forget(namespace))
        await asyncio.shield(forgotten)

    async def stats(self) -> EngineStats:
        """See `EngineClient.stats`."""
        if not self.connected:
            raise EngineUnavailable("the engine is not connected")
        number, reply = self._ping()
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await reply
        except TimeoutError:
            raise EngineUnavailable("the engine does not respond") from None
        finally:
            self._pongs.pop(number, None)

    async def drain(self) -> None:
        """Refuse new requests of this gateway, not those that go on, and wait for open ones. Other gateways are not affected."""
        self._draining = True
        while self._streams:
            await asyncio.sleep(DRAIN_POLL_S)

    def request_drain(self, grace_s: float) -> None:
        """Ask the engine's process to drain and end, for all its gateways. Raises `EngineUnavailable`."""
        if not self.connected or not self._send(wire.Drain(grace_s)):
            raise EngineUnavailable("the engine is not connected")

    def fail_open(self, reason: str) -> None:
        """Abort every open request; it ends with `Failed(server_shutting_down)` once the engine has acknowledged that."""
        for request_id, stream in self._streams.items():
            if not stream.ended:
                stream.fail(shutting_down(request_id, reason))
                self._request_abort(request_id)

    def lose(self, reason: str) -> None:
        """Treat the engine as lost at once."""
        if self.connected:
            self._log.warning("engine lost", reason=reason, requests=self.open_requests)
        self._reset(reason)

    def _refusal(self, request: EngineRequest) -> Failed | None:
        request_id = request.request_id
        if self._draining and not request.received:
            return shutting_down(request_id, "the server is shutting down")
        if not self.connected:
            return unavailable(request_id, "the engine is starting or restarting")
        if request_id in self._streams or request_id in self._aborts:
            return Failed(request_id, InvalidRequest.code, "`request_id` is in use", "request_id")
        if request_id in self._lost and time.monotonic() < self._may_run_until:
            return unavailable(request_id, "the engine was silent and may still run the request")
        return None

    async def _reconnected(self) -> None:
        """Wait for the engine if it was lost within the last `RECONNECT_S`."""
        left_s = self._reconnect_until - time.monotonic()
        if not self.connected and left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ready.wait()

    async def _tick(self) -> None:
        """Connect, send `Hello` until `Welcome` arrives, then ping, repeat unacknowledged messages and detect silence."""
        while True:
            self._clock.tick(time.monotonic())
            if self.connected and self.silent_for() > self._silence_s:
                self.lose("the engine is silent")
            if self._socket is None and not self._connect():
                await asyncio.sleep(wire.PING_INTERVAL_S)
                continue
            if not self.connected:
                self._send(wire.Hello(wire.PROTOCOL_VERSION))
                with suppress(TimeoutError):
                    async with asyncio.timeout(HELLO_INTERVAL_S):
                        await self._ready.wait()
                continue
            self._ping()
            for request_id in self._aborts:
                self._send(wire.Abort(request_id))
            for namespace in self._forgets:
                self._send(wire.Forget(namespace))
            await asyncio.sleep(wire.PING_INTERVAL_S)

    def _connect(self) -> bool:
        """Open a new socket per session: messages queued for a lost engine must never reach the next one.

        False while the process has no file or memory left for one.
        """
        try:
            socket = self._context.socket(zmq.DEALER)
        except (zmq.ZMQError, OSError) as error:
            self._log.error("no socket for the engine; trying again", reason=str(error))
            return False
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.connect(self.address)
        self._socket = LoopSocket(socket, self._receive)
        return True

    def _disconnect(self, linger_s: float = 0.0) -> None:
        if self._socket is not None:
            self._socket.close(linger_s)
            self._socket = None

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_gateway(b"".join(frames))
        except msgspec.MsgspecError:
            self._log.warning("malformed message ignored")
        else:
            self._handle(message)

    def _handle(self, message: wire.ToGateway) -> None:
        self._heard_at = self._clock.time
        match message:
            case wire.Events(events):
                for event in events:
                    self._deliver(event)
            case wire.Aborted(request_id):
                acknowledged = self._aborts.pop(request_id, None)
                if acknowledged is not None:
                    acknowledged.set()
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.end()
            case wire.Probed(probe_id, report, reason):
                self._settle_probe(probe_id, report, reason)
            case wire.Forgotten(namespace):
                forgotten = self._forgets.pop(namespace, None)
                if forgotten is not None:
                    forgotten.set_result(None)
            case wire.Pong(number, stats):
                self.last_stats = self.known_stats = stats
                self.known_at = datetime.now(UTC)
                reply = self._pongs.pop(number, None)
                if reply is not None and not reply.done():
                    reply.set_result(stats)
            case wire.Welcome(_, info, instance):
                if self._info is not None and self._info.system_fingerprint != info.system_fingerprint:
                    self._log.warning(
                        "the engine came back with another fingerprint: restart this gateway, which writes prompts by the files it read",
                        before=self._info.system_fingerprint,
                        now=info.system_fingerprint,
                    )
                self._info = info
                self._note_instance(instance)
                self._ready.set()
            case wire.Goodbye(reason, drained):
                if drained:
                    self._send(wire.Farewell())
                    self._reset(reason, EngineDraining.code)
                elif self.connected:
                    self.lose(reason)
                    self._lost = {}  # it knows this gateway no more, and runs none of these

    def bury(self, reason: str) -> None:
        """Treat the engine as lost, and its process as dead: its parent knows."""
        self.lose(reason)
        self._note_instance(None)

    def _note_instance(self, instance: str | None) -> None:
        """Report the death of the previous engine process, if this is another one, or none."""
        died = self._instance not in (None, instance)
        self._instance = instance
        if died:
            lost, self._lost = self._lost, {}
            self.deaths += 1
            self._on_death(lost.values())

    def _settle_probe(self, probe_id: str, report: ProbeReport | None, reason: str) -> None:
        reply = self._probes.get(probe_id)
        if reply is None or reply.done():
            return
        if report is None:
            reply.set_exception(EngineUnavailable(reason))
        else:
            reply.set_result(report)

    def _deliver(self, event: Event) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None and not stream.put(event):
            message = "the response was not read fast enough"
            stream.fail(Failed(event.request_id, RequestTimeout.code, message))
            self._request_abort(event.request_id)

    def _request_abort(self, request_id: str) -> asyncio.Event:
        acknowledged = self._aborts.get(request_id)
        if acknowledged is None:
            acknowledged = asyncio.Event()
            if not self.connected:
                acknowledged.set()
                return acknowledged
            self._aborts[request_id] = acknowledged
        self._send(wire.Abort(request_id))
        return acknowledged

    def _ping(self) -> tuple[int, asyncio.Future[EngineStats]]:
        self._number += 1
        for number in [number for number in self._pongs if number < self._number - 64]:
            self._pongs.pop(number).cancel()
        reply: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._pongs[self._number] = reply
        self._send(wire.Ping(self._number))
        return self._number, reply

    def _reset(self, reason: str, code: str = EngineLost.code) -> None:
        """End what is open with `code`. Of an engine that drained it goes on elsewhere, and nothing died."""
        is_lost = code == EngineLost.code
        if self.connected:
            self._lost = {}
            self._may_run_until = time.monotonic() + wire.PEER_TIMEOUT_S
            self._reconnect_until = time.monotonic() + RECONNECT_S * is_lost
        if not is_lost:
            self._instance = None
        self._ready.clear()
        self._disconnect(0.0 if is_lost else FAREWELL_S)
        self._heard_at = self._clock.time
        self.last_stats = None
        for request_id, stream in self._streams.items():
            if not stream.ended and is_lost:
                self._lost[request_id] = self._open[request_id]
            stream.put(Failed(request_id, code, f"the engine was lost: {reason}"))
        for acknowledged in self._aborts.values():
            acknowledged.set()
        self._aborts.clear()
        for probe_id in self._probes:
            if is_lost:
                self._lost[probe_id] = self._open[probe_id]
            self._settle_probe(probe_id, None, f"the engine was lost: {reason}")
        for forgotten in self._forgets.values():
            forgotten.set_exception(EngineUnavailable(f"the engine was lost: {reason}"))
            forgotten.exception()  # retrieved here, because the caller of `forget` may be gone
        self._forgets.clear()

    def _send(self, message: wire.ToEngine) -> bool:
        """Send a message. False without a connection or with a full queue; `_tick` repeats messages that must arrive."""
        if self._socket is None:
            return False
        try:
            self._socket.send(wire.encode(message))
        except zmq.ZMQError:
            return False
        return True


def unavailable(request_id: str, message: str) -> Failed:
    """The end of a request that no engine can take now."""
    return Failed(request_id, EngineUnavailable.code, message)


def shutting_down(request_id: str, message: str) -> Failed:
    """The end of a request of a gateway that shuts down."""
    return Failed(request_id, ServerShuttingDown.code, message)
