"""The engine's side of the socket: serves any `EngineClient` to several gateways at once.

Invariant: every running request belongs to a live peer; a peer silent for `PEER_TIMEOUT_S` loses its requests.
"""

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import suppress
from uuid import uuid4

import msgspec
import structlog
import zmq

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineDraining, EngineError, EngineLost
from loraplex.engine.messages import EngineRequest, Event, Failed
from loraplex.platform.engines import wire
from loraplex.platform.engines.loop_clock import LoopClock
from loraplex.platform.engines.loop_socket import LoopSocket

MAX_UNSENT_EVENTS = 100_000
ABORT_GRACE_S = 5.0
LINGER_S = 2.0
"""For the last events of a drain: a peer's queue may be full when the last request has ended, or not yet written."""
FLUSH_POLL_S = 0.01
MAX_PROBES_PER_PEER = 8
MALFORMED_LOG_INTERVAL_S = 10.0
UNASKED = 0
"""The number of a `Pong` that no `Ping` asked for."""


class Peer:
    """One connected gateway: the time of its last message, its requests and its unsent events."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.heard_at = 0.0
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.probes: dict[str, asyncio.Task[None]] = {}
        self.unsent: list[Event] = []
        self.flush_scheduled = False


class EngineServer:
    """Serves `engine` on `address` until `close`. It runs on one event loop; the bytes of a peer never raise in it.

    `broken` is set once the engine itself has failed, so that its process must end; `draining` once it is to drain, which a
    gateway may have asked for (`was_asked`).
    """

    def __init__(self, engine: EngineClient, address: str) -> None:
        self._engine = engine
        self._address = address
        self._path = wire.socket_path(address)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._socket: LoopSocket | None = None
        self._peers: dict[bytes, Peer] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._clock = LoopClock(wire.PING_INTERVAL_S, time.monotonic())
        self._instance = uuid4().hex
        self._malformed_logged_at = 0.0
        self._log = structlog.get_logger("loraplex.engine_server")
        self.malformed = 0
        self.broken = asyncio.Event()
        self.draining = asyncio.Event()
        self.was_asked = False
        self._drained = False
        self._grace: asyncio.Timeout | None = None
        self._ends_at = math.inf

    async def start(self) -> None:
        """Listen. The socket file is 0600 in a 0700 folder. Raises `SettingsError` or `zmq.ZMQError`."""
        wire.private_folder(self._path.parent)
        self._path.unlink(missing_ok=True)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = LoopSocket(socket, self._receive)
        socket.bind(self._address)
        self._path.chmod(0o600)
        self._spawn(self._watch_peers())

    def begin_drain(self, grace_s: float) -> None:
        """Let `drain` begin, and end at most `grace_s` from now."""
        self._ends_at = min(self._ends_at, self._loop.time() + grace_s)
        if self._grace is not None:
            self._grace.reschedule(self._ends_at)
        self.draining.set()

    async def drain(self) -> None:
        """Refuse new requests, and fail those that have not ended in time with `engine_draining`: they go on elsewhere."""
        ended = self._loop.create_task(self._engine.drain())
        await asyncio.sleep(0)
        for peer in self._peers.values():
            self._spawn(self._pong(peer, UNASKED))
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._ends_at) as self._grace:
                await ended
                while tasks := [task for peer in self._peers.values() for task in peer.tasks.values()]:
                    await asyncio.wait(tasks)
        self._grace = None
        for peer in list(self._peers.values()):
            for request_id, task in list(peer.tasks.items()):
                task.cancel()
                self._queue(peer, Failed(request_id, EngineDraining.code, "the engine drained meanwhile"))
        self._drained = True

    async def close(self) -> None:
        """Abort running requests and stop listening. Events that were queued before still reach peers that read."""
        await self._flush_all()
        if self._drained:
            await self._take_leave()
        for peer in list(self._peers.values()):
            self._drop(peer, "the engine shuts down")
        for task in list(self._background):
            task.cancel()
        if self._socket is not None:
            self._socket.close(LINGER_S)
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self._context.term)
        self._path.unlink(missing_ok=True)

    async def _take_leave(self) -> None:
        """Let the gateways read what was sent: they drop what they have not read when the connection ends."""
        for identity in list(self._peers):
            self._send(identity, wire.Goodbye("it was drained", drained=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self._peers:
                    await asyncio.sleep(FLUSH_POLL_S)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_engine(frames[1]) if len(frames) == 2 else None
        except msgspec.MsgspecError:
            message = None
        if message is None:
            self._count_malformed()
        else:
            self._handle(frames[0], message)

    def _handle(self, identity: bytes, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Hello):
            self._hello(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._send(identity, wire.Goodbye("unknown peer"))
            return
        peer.heard_at = self._clock.time
        match message:
            case wire.Submit(request):
                self._submit(peer, request)
            case wire.Abort(request_id):
                self._spawn(self._abort(peer, request_id))
            case wire.Probe():
                self._begin_probe(peer, message)
            case wire.Forget(namespace):
                self._spawn(self._forget(peer, namespace))
            case wire.Ping(number):
                self._spawn(self._pong(peer, number))
            case wire.Farewell():
                del self._peers[identity]
            case wire.Drain(grace_s):
                self.was_asked = True
                self.begin_drain(grace_s)

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        if hello.protocol != wire.PROTOCOL_VERSION:
            self._send(identity, wire.Goodbye(f"this engine speaks protocol {wire.PROTOCOL_VERSION}"))
            return
        self._peers.setdefault(identity, Peer(identity)).heard_at = self._clock.time
        self._send(identity, wire.Welcome(wire.PROTOCOL_VERSION, self._engine.info(), self._instance))

    def _submit(self, peer: Peer, request: EngineRequest) -> None:
        request_id = request.request_id
        if any(request_id in other.tasks for other in self._peers.values()):
            failure = Failed(request_id, "invalid_request", "`request_id` is in use", "request_id")
            self._queue(peer, failure)
            return
        peer.tasks[request_id] = self._spawn(self._pump(peer, request))

    async def _pump(self, peer: Peer, request: EngineRequest) -> None:
        try:
            async for event in self._engine.submit(request):
                if isinstance(event, Failed) and event.code == EngineLost.code:
                    # The process ends now: its gateways then know this request as one that was open when it died.
                    self.broken.set()
                    return
                self._queue(peer, event)
        except Exception as error:  # noqa: BLE001 - one request's defect must not end the others
            self._log.exception("request failed", request_id=request.request_id)
            self._queue(
                peer, Failed(request.request_id, EngineError.code, f"internal error: {type(error).__name__}")
            )
        finally:
            peer.tasks.pop(request.request_id, None)

    def _queue(self, peer: Peer, event: Event) -> None:
        """Queue an event. Events of one tick of the event loop are sent as one message."""
        peer.unsent.append(event)
        if not peer.flush_scheduled:
            peer.flush_scheduled = True
            self._loop.call_soon(self._flush, peer)

    def _flush(self, peer: Peer) -> None:
        peer.flush_scheduled = False
        if not peer.unsent or self._peers.get(peer.identity) is not peer:
            return
        if self._send(peer.identity, wire.Events(peer.unsent)):
            peer.unsent = []
        elif len(peer.unsent) > MAX_UNSENT_EVENTS:
            self._drop(peer, "the gateway does not read its events")

    async def _flush_all(self) -> None:
        """Send what is queued for all peers, as far as they read it within `LINGER_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while any(peer.unsent for peer in self._peers.values()):
                    for peer in list(self._peers.values()):
                        self._flush(peer)
                    await asyncio.sleep(FLUSH_POLL_S)

    async def _abort(self, peer: Peer, request_id: str) -> None:
        """End a request of this peer and acknowledge. Requests of other peers are not found here."""
        task = peer.tasks.get(request_id)
        if task is not None:
            await self._end(request_id, task)
        self._flush(peer)
        # The acknowledgement follows the last events. While those cannot be sent, the gateway repeats its abort.
        if not peer.unsent:
            self._send(peer.identity, wire.Aborted(request_id))

    def _begin_probe(self, peer: Peer, message: wire.Probe) -> None:
        if len(peer.probes) >= MAX_PROBES_PER_PEER or message.probe_id in peer.probes:
            self._send(peer.identity, wire.Probed(message.probe_id, None, "too many adapters are probed"))
            return
        peer.probes[message.probe_id] = self._spawn(self._probe(peer, message))

    async def _probe(self, peer: Peer, message: wire.Probe) -> None:
        try:
            reply = wire.Probed(message.probe_id, await self._engine.probe(message.adapter))
        except EngineError as error:
            reply = wire.Probed(message.probe_id, None, str(error))
        except Exception as error:  # noqa: BLE001 - one probe's defect must not end the others
            self._log.exception("probe failed", digest=message.adapter.digest)
            reply = wire.Probed(message.probe_id, None, f"internal error: {type(error).__name__}")
        finally:
            peer.probes.pop(message.probe_id, None)
        self._send(peer.identity, reply)

    async def _forget(self, peer: Peer, namespace: bytes) -> None:
        """End the requests of a tenant, whichever gateway sent them, and acknowledge to this peer."""
        try:
            await self._engine.forget(namespace)
        except EngineError:
            self._log.warning("forgetting failed")
            return
        self._send(peer.identity, wire.Forgotten(namespace))

    async def _end(self, request_id: str, task: asyncio.Task[None]) -> None:
        try:
            await self._engine.abort(request_id)
        except EngineError:
            self._log.warning("abort failed", request_id=request_id)
        await asyncio.wait({task}, timeout=ABORT_GRACE_S)
        if not task.done():
            task.cancel()

    async def _pong(self, peer: Peer, number: int) -> None:
        try:
            self._send(peer.identity, wire.Pong(number, await self._engine.stats()))
        except EngineError as error:
            self._log.error("the engine returns no statistics", error=str(error))
            self.broken.set()

    async def _watch_peers(self) -> None:
        while True:
            await asyncio.sleep(wire.PING_INTERVAL_S)
            self._clock.tick(time.monotonic())
            limit = self._clock.time - wire.PEER_TIMEOUT_S
            for peer in list(self._peers.values()):
                if peer.heard_at < limit:
                    self._drop(peer, "the gateway is silent")
                elif peer.unsent:
                    self._flush(peer)

    def _drop(self, peer: Peer, reason: str) -> None:
        self._log.info("gateway dropped", reason=reason, requests=len(peer.tasks))
        if self._peers.pop(peer.identity, None) is None:
            return
        for probe in list(peer.probes.values()):
            probe.cancel()
        for request_id, task in list(peer.tasks.items()):
            self._spawn(self._end(request_id, task))

    def _send(self, identity: bytes, message: wire.ToGateway) -> bool:
        """Give one message to the socket. False if the peer's queue is full; a disconnected peer is dropped."""
        if self._socket is None:
            return False
        try:
            self._socket.send(identity, wire.encode(message))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                return False
            peer = self._peers.get(identity)
            if peer is not None:
                self._drop(peer, "the gateway is gone")
        return True

    def _count_malformed(self) -> None:
        self.malformed += 1
        now = time.monotonic()
        if now - self._malformed_logged_at > MALFORMED_LOG_INTERVAL_S:
            self._malformed_logged_at = now
            self._log.warning("malformed message ignored", total=self.malformed)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
