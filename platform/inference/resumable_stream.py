"""The events of one engine request over as many engines as it takes: where one is lost or drains, another one goes on.

Invariants: its reader sees the stream of one engine: `Started` once, and no token twice. What lost two engines ends.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec.structs import replace

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import (
    EngineDraining,
    EngineError,
    EngineLost,
    EngineLostTwice,
    EngineUnavailable,
    RequestTimeout,
)
from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Scored, Started

MAX_RESUMPTIONS: Final = 2
MAX_DEATHS: Final = 1
"""A request that runs at one more death may be what kills the engines."""
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 1.0
"""Until the next try, twice as long each time, after an engine that drains or restarts has refused a request."""
HELD_S: Final = 1.0
"""An engine that says nothing for so long before it drains has queued the request, not refused it."""
LOG: Final = structlog.get_logger("loraplex.resumption")


@dataclass(frozen=True, slots=True)
class ResumptionPolicy:
    """`restart_s`: longest wait for an engine, beside the request's deadlines. `refuses`: whether a request may not run any more."""

    restart_s: float = 30.0
    refuses: Callable[[EngineRequest], bool] = lambda _: False


DEFAULT_RESUMPTION: Final = ResumptionPolicy()


class ResumableStream:
    """One engine request. `resumptions`: how often another engine, or the same after its restart, went on with it; `engine`: the last.

    Once `closing` is set it is not resumed.
    """

    def __init__(
        self, engine: EngineClient, request: EngineRequest, policy: ResumptionPolicy, closing: asyncio.Event
    ) -> None:
        self._engine = engine
        self._request = request
        self._policy = policy
        self._closing = closing
        self._began = time.monotonic()
        self._give_up_at: float | None = None
        self._retry_s = RETRY_S
        self._deaths = 0
        self._started: Started | None = None
        self._scored: set[int] = set()
        # Four bytes for each token: a gateway has thousands of long responses.
        self._received = {choice: array("I") for choice in range(request.sampling.n)}
        self.resumptions = 0
        self.engine: str | None = None

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events to the last one, as `EngineClient.submit`."""
        request, failure = self._request, None
        while not self._closing.is_set():
            failure, submitted, has_run = None, time.monotonic(), False
            async for event in self._engine.submit(request):
                if isinstance(event, Failed) and self._may_resume(event):
                    failure = event
                    continue
                has_run = True
                if isinstance(event, Started):
                    self.engine = event.engine
                    if self._started is not None and not self._is_same(event, request):
                        await self._engine.abort(request.request_id)
                        yield _failed(request, "the engine that would go on with it serves another model")
                        return
                if self._is_new(event):
                    self._keep(event)
                    yield event
            if failure is None or not self._received:
                return
            has_run |= time.monotonic() - submitted > HELD_S
            following = await self._following(failure, has_run=has_run)
            if isinstance(following, Failed):
                yield following
                return
            request = following
        if failure is not None:
            yield failure

    def _may_resume(self, failure: Failed) -> bool:
        """Whether the failure is that of an engine, not of the request. A first one that has no engine at all is refused."""
        if failure.code == EngineUnavailable.code:
            return self.resumptions > 0
        return failure.code in (EngineLost.code, EngineDraining.code)

    def _is_new(self, event: Event) -> bool:
        """Whether the reader has not had it from an engine before this one."""
        if isinstance(event, Started):
            return self._started is None
        return not (isinstance(event, Scored) and event.choice in self._scored)

    def _keep(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Scored(choice=choice):
                self._scored.add(choice)
            case Delta(choice=choice, token_ids=token_ids):
                self._received[choice].extend(token_ids)
            case Finished(choice=choice):
                self._received.pop(choice, None)

    def _is_same(self, started: Started, request: EngineRequest) -> bool:
        """Whether an engine goes on with this request as the first one began it. One of an earlier release begins anew."""
        first = self._started
        return (
            first is not None
            and (started.digest, started.system_fingerprint) == (first.digest, first.system_fingerprint)
            and started.resumed == bool(request.received)
        )

    async def _following(self, failure: Failed, *, has_run: bool) -> EngineRequest | Failed:
        """Wait for an engine, and return what it gets; or the end of the request. `has_run`: the last one took it."""
        is_death, request = failure.code == EngineLost.code, self._request
        if is_death or has_run:
            self._deaths += is_death
            self.resumptions += 1
            self._give_up_at, self._retry_s = None, RETRY_S
            if self._deaths > MAX_DEATHS:
                return _failed(request, "two engines were lost while they had this request", EngineLostTwice)
            if self.resumptions > MAX_RESUMPTIONS:
                return failure
            tokens = sum(map(len, self._received.values()))
            LOG.info(
                "request goes on", engine_request=request.request_id, after=failure.message, tokens=tokens
            )
        else:
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + self._policy.restart_s
        is_ready = await self._is_ready(
            min([self._give_up_at - time.monotonic(), *self._timely().timeouts.values()])
        )
        if self._timely().timeouts.get("total_timeout_s", 1.0) <= 0:
            return _failed(request, "the request's `total_timeout_s` has passed", RequestTimeout)
        if not is_ready:
            return failure
        if self._policy.refuses(request):
            return _failed(request, "engines ended while they ran what it uses", EngineLostTwice)
        return self._behind_received()

    async def _is_ready(self, seconds: float) -> bool:
        """Wait for an engine; False when none comes in time, or the request is to end."""
        if seconds <= 0:
            return False
        ready = asyncio.ensure_future(self._engine.wait_ready())
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({ready, closing}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return ready.done() and ready.exception() is None and not closing.done()
        finally:
            ready.cancel()
            closing.cancel()

    def _timely(self) -> EngineRequest:
        """The request with what is left of its deadlines."""
        return self._request.shortened(time.monotonic() - self._began, has_token=self._started is not None)

    def _behind_received(self) -> EngineRequest:
        request = self._timely()
        if self._scored and request.sampling.max_tokens:
            request = replace(request, scores=None)
        if len(self._received) == request.sampling.n and not any(self._received.values()):
            return request
        return replace(request, received={choice: ids.tolist() for choice, ids in self._received.items()})


def _failed(request: EngineRequest, message: str, error: type[EngineError] = EngineLost) -> Failed:
    return Failed(request.request_id, error.code, message)
