"""Reads the engine's events of one request until the engine has ended it, also after the client has left.

Invariant: every event is counted, also those between the client's leaving and the end of the aborted request.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import structlog

from loraplex.engine.client import EngineClient
from loraplex.engine.messages import EngineRequest, Event
from loraplex.platform.inference.resumable_stream import DEFAULT_RESUMPTION, ResumableStream, ResumptionPolicy
from loraplex.platform.observability.request_stats import RequestStats

WAITING_EVENTS = 8
ABORT_S = 6.0
LOG = structlog.get_logger("loraplex.engine_streams")


class EngineStreams:
    """One engine request per prompt; a task of its own submits and reads each. `next` is for a single consumer.

    Requests from `num_prompts` on score behind a prompt each. They wait until it is computed, so that its blocks are
    found, and have what is left of its total time.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[EngineRequest],
        stats: RequestStats,
        num_prompts: int | None = None,
        resumption: ResumptionPolicy = DEFAULT_RESUMPTION,
    ) -> None:
        """`num_prompts` None: all requests are of prompts."""
        self._resumption = resumption
        self._engine = engine
        self._requests = requests
        self._stats = stats
        self._events = deque[tuple[int, Event | None]]()
        self._arrived = asyncio.Event()
        # In turn: a prompt whose events are there already would otherwise take all room that the consumer makes.
        self._room = asyncio.Semaphore(WAITING_EVENTS * len(requests))
        self._open = set(range(len(requests)))
        self._closing = asyncio.Event()
        self._num_prompts = len(requests) if num_prompts is None else num_prompts
        self._computed = [asyncio.Event() for _ in range(self._num_prompts)]
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
            *(self._engine.abort(self._requests[prompt].request_id) for prompt in self._open)
        )

    async def _drain(self) -> None:
        while await self.next() is not None:
            continue

    async def _read(self, prompt: int) -> None:
        request = self._requests[prompt]
        computed, began = self._computed[prompt % self._num_prompts], time.monotonic()
        try:
            if prompt >= self._num_prompts:
                await computed.wait()
                request = request.shortened(time.monotonic() - began, has_token=True)
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
            LOG.exception("the engine's stream ended", engine_request=request.request_id)
        computed.set()
        self._put(prompt, None)

    def _put(self, prompt: int, event: Event | None) -> None:
        self._events.append((prompt, event))
        self._arrived.set()
