"""Reads the engine's events of one request until the engine has ended it, also after the client has left.

Invariant: every event is counted, also those between the client's leaving and the end of the aborted request.
"""

import asyncio
import sys
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext

import structlog

from loraplex.engine.client import EngineClient
from loraplex.engine.messages import EngineRequest, Event
from loraplex.platform.inference.resumable_stream import DEFAULT_RESUMPTION, ResumableStream, ResumptionPolicy
from loraplex.platform.observability.request_stats import RequestStats

WAITING_EVENTS = 8
ABORT_S = 6.0
LOG = structlog.get_logger("loraplex.engine_streams")


class EnginePlaces:
    """At most `total` sequences of some requests are in the engine at once, first come, first served."""

    def __init__(self, total: int) -> None:
        self._turn = asyncio.Lock()
        self._free = asyncio.Semaphore(total)

    @asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Wait for places, of which no request needs more than there are, and hold them."""
        taken = 0
        try:
            async with self._turn:
                while taken < sequences:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


class EngineStreams:
    """A task of its own submits and reads each engine request. `next` is for a single consumer."""

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[EngineRequest],
        stats: RequestStats,
        after: Mapping[int, int] | None = None,
        resumption: ResumptionPolicy = DEFAULT_RESUMPTION,
        places: EnginePlaces | None = None,
    ) -> None:
        """`after`: request -> the one before it that it waits for, so that the blocks of their common prompt are found; it has what is
        left of its total time. `places`: bounds the sequences of all requests in the engine.
        """
        self._resumption = resumption
        self._engine = engine
        self._requests = requests
        self._stats = stats
        self._events = deque[tuple[int, Event | None]]()
        self._arrived = asyncio.Event()
        # In turn: a prompt whose events are there already would otherwise take all room that the consumer makes.
        # Rows that hold places wait for no consumer, which may wait for rows that need them.
        self._room = asyncio.Semaphore(WAITING_EVENTS * len(requests) if places is None else sys.maxsize)
        self._open = set(range(len(requests)))
        self._submitted = set[int]()
        self._closing = asyncio.Event()
        self._after = after or {}
        self._places = places
        self._computed = defaultdict[int, asyncio.Event](asyncio.Event)
        self._readers = [asyncio.create_task(self._read(prompt)) for prompt in self._open]

    async def next(self) -> tuple[int, Event] | None:
        """Return (prompt, event) in the order of arrival; None once every request has ended."""
        while self._open:
            while not self._events:
                self._arrived.clear()
                await self._arrived.wait()
            prompt, event = self._events.popleft()
            if event is not None:
                self._room.release()
                return prompt, event
            self._open.discard(prompt)
        return None

    async def close(self) -> None:
        """Abort the running requests and count their events to the end, for at most `ABORT_S` seconds. May be repeated."""
        self._closing.set()
        if not self._open:
            return
        try:
            async with asyncio.timeout(ABORT_S):
                await asyncio.gather(self._drain(), self.abort())
        except TimeoutError:
            LOG.warning("the engine did not end aborted requests", requests=len(self._open))
        finally:
            for reader in self._readers:
                reader.cancel()
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def abort(self) -> None:
        """Abort the running requests; `next` goes on to return what they computed, to their ends. May be repeated."""
        self._closing.set()
        await asyncio.gather(
            *(
                self._engine.abort(self._requests[prompt].request_id)
                for prompt in self._open & self._submitted
            )
        )

    async def _drain(self) -> None:
        while await self.next() is not None:
            continue

    async def _read(self, prompt: int) -> None:
        places, computed, began = self._places, self._computed[prompt], time.monotonic()
        try:
            if prompt in self._after:
                await self._computed[self._after[prompt]].wait()
            sequences = self._requests[prompt].sampling.n
            async with nullcontext() if places is None else places.taken(sequences):
                # A long sequence of requests makes each where it is asked for.
                request = self._requests[prompt]
                if prompt in self._after or places is not None:
                    request = request.shortened(time.monotonic() - began, has_token=prompt in self._after)
                self._submitted.add(prompt)
                # A task that has not begun before the abort submits nothing after it.
                stream = ResumableStream(self._engine, request, self._resumption, self._closing)
                async for event in stream.events():
                    self._stats.see(prompt, event)
                    self._stats.resumed = max(self._stats.resumed, stream.resumptions)
                    self._stats.engine = stream.engine
                    computed.set()
                    await self._room.acquire()
                    self._put(prompt, event)
        except Exception:
            LOG.exception("the engine's stream ended", engine_request=self._requests[prompt].request_id)
        computed.set()
        self._put(prompt, None)

    def _put(self, prompt: int, event: Event | None) -> None:
        self._events.append((prompt, event))
        self._arrived.set()
