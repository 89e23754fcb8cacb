"""The events of one engine request over as many engines as it takes: where one is lost or drains, another one goes on.

Invariants: its reader sees the stream of one engine: `Started` once, and no token twice. What ran at two deaths of engines ends.
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
from loraplex.engine.errors import EngineDraining, EngineLost, EngineLostTwice, EngineUnavailable
from loraplex.engine.messages import Delta, EngineRequest, Event, Failed, Finished, Scored, Started

MAX_RESUMPTIONS: Final = 2
MAX_DEATHS: Final = 1
"""A request that runs at one more death may be what kills the engines."""
RETRY_S: Final = 0.1
"""Until the next try, after an engine that drains or restarts has refused a request that is on its way to another one."""
LOG: Final = structlog.get_logger("loraplex.resumption")


@dataclass(frozen=True, slots=True)
class ResumptionPolicy:
    """`restart_s`: longest wait for an engine, beside the request's deadlines. `refuses`: whether a request may not run any more."""

    restart_s: float = 30.0
    refuses: Callable[[EngineRequest], bool] = lambda _: False


DEFAULT_RESUMPTION: Final = ResumptionPolicy()


class ResumableStream:
    """One engine request. `resumptions`: how often another engine, or the same after its restart, went on with it.

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
        self._give_up_at = 0.0
        self._deaths = 0
        self._has_run = False
        self._started: Started | None = None
        self._scored: set[int] = set()
        # Four bytes for each token: a gateway has thousands of long responses.
        self._received = {choice: array("I") for choice in range(request.sampling.n)}
        self.resumptions = 0

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events to the last one, as `EngineClient.submit`."""
        request, failure = self._request, None
        while not self._closing.is_set():
            failure, self._has_run = None, False
            async for event in self._engine.submit(request):
                if isinstance(event, Failed) and self._may_resume(event):
                    failure = event
                    continue
                self._has_run = True
                if isinstance(event, Started) and self._started is not None:
                    if not self._is_same(event, request):
                        await self._engine.abort(request.request_id)
                        yield _failed(
                            event.request_id, "the engine that would go on with it serves another model"
                        )
                        return
                elif not (isinstance(event, Scored) and event.choice in self._scored):
                    self._keep(event)
                    yield event
            if failure is None or not self._received:
                return
            following = await self._resumed(failure)
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

    async def _resumed(self, failure: Failed) -> EngineRequest | Failed:
        """Wait for an engine, and return what it gets; or the end of the request."""
        is_death = failure.code == EngineLost.code
        if is_death or self._has_run:
            self._deaths += is_death
            self.resumptions += 1
            self._give_up_at = time.monotonic() + self._policy.restart_s
            if self._deaths > MAX_DEATHS:
                return _failed(
                    failure.request_id, "two engines were lost while they had this request", EngineLostTwice
                )
            if self.resumptions > MAX_RESUMPTIONS:
                return failure
        else:
            self._give_up_at = self._give_up_at or time.monotonic() + self._policy.restart_s
            await asyncio.sleep(RETRY_S)
        wait_s = min([self._give_up_at - time.monotonic(), *self._shortened().timeouts.values()])
        if not await self._is_ready(wait_s):
            return failure
        request = self._shortened()
        if self._policy.refuses(request):
            return _failed(failure.request_id, "engines ended while they ran what it uses", EngineLostTwice)
        tokens = sum(map(len, self._received.values()))
        LOG.info("request resumed", engine_request=request.request_id, after=failure.message, tokens=tokens)
        return request

    async def _is_ready(self, seconds: float) -> bool:
        """Wait for an engine; False when none comes in time, or the request is to end."""
        if seconds <= 0:
            return False
        waits = {asyncio.ensure_future(self._engine.wait_ready()), asyncio.create_task(self._closing.wait())}
        done, waiting = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        return bool(done) and not self._closing.is_set()

    def _shortened(self) -> EngineRequest:
        """The request behind what was received, with what is left of its deadlines."""
        request = self._request.shortened(time.monotonic() - self._began, has_token=self._started is not None)
        if self._scored and request.sampling.max_tokens:
            request = replace(request, scores=None)
        if len(self._received) == request.sampling.n and not any(self._received.values()):
            return request
        return replace(request, received={choice: ids.tolist() for choice, ids in self._received.items()})


def _failed(request_id: str, message: str, error: type[EngineUnavailable] = EngineLost) -> Failed:
    return Failed(request_id, error.code, message)
