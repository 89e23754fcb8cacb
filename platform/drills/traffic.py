"""Requests at a steady rate, and what became of each as its client knows it.

Invariant: every request that was begun has one outcome, and an id of its own, which the ledger keeps as the client's.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from loraplex.platform.bench.client import (
    Completion,
    CompletionRequest,
    StreamRecord,
    decode,
    stream_completion,
)

MAX_OPEN: Final = 64
"""Requests in progress at once. Later ones wait: a server that hangs gets no more than these."""
MAX_PROMPT_TOKENS: Final = 100
"""More than the prompt of a drill's request has in any vocabulary."""
TIMEOUT_S: Final = 120.0
NO_CONNECTION: Final = "no_connection"
CONNECTION_LOST: Final = "connection_lost"
CLIENT_TIMEOUT: Final = "client_timeout"
# Long enough for a block of the prefix cache, so that some of its tokens are charged as cached ones.
_PROMPT: Final = (
    "This request belongs to a drill of the installation. It repeats these words so that they are cached. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillLoad:
    """Requests of a drill: `rate_per_s`, each of `max_tokens` tokens. After the fault it waits at most `recover_s` seconds."""

    rate_per_s: float = 4.0
    max_tokens: int = 16
    recover_s: float = 120.0
    stream_share: float = 0.5


@dataclass(frozen=True, slots=True)
class ReportedUsage:
    """The tokens that a response says it used. `cached` are among `prompt`, and `reasoning` among `completion`."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request, with times in seconds of `time.monotonic`.

    `request_id` is what the client sent as `x-request-id`; `Traffic` always sends one. `status` 0: no response began. `code`: the
    server's error code, or one of this module for what the client noticed itself; None of a complete response. `deliveries`
    counts pieces of text received, each of at least one token. `base_url`: the server that was asked. `first_token_s`: from the
    sending, of streams.
    """

    request_id: str | None
    started_s: float
    ended_s: float
    status: int
    code: str | None
    complete: bool
    usage: ReportedUsage | None
    deliveries: int
    first_token_s: float | None = None
    retry_after: str | None = None
    base_url: str = ""


class Traffic:
    """Sends completions from the begin of its block until `stop`, in turn to each of `base_urls`.

    `rate_per_s` holds as long as fewer than `max_open` requests are in progress. `stream_share` of the requests, 0 to 1, are
    streamed. `outcomes` has the requests that have ended.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        api_key: str,
        model: str,
        rate_per_s: float,
        max_tokens: int,
        stream_share: float = 0.5,
        timeout_s: float = TIMEOUT_S,
        max_open: int = MAX_OPEN,
    ) -> None:
        self.outcomes: list[RequestOutcome] = []
        self._base_urls = base_urls
        self._api_key = api_key
        self._model = model
        self._interval_s = 1 / rate_per_s
        self._max_tokens = max_tokens
        self._stream_share = stream_share
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_open)
        self._open: set[asyncio.Task[None]] = set()
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._sending = asyncio.create_task(self._send())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for task in self._open:
                task.cancel()
        await self.stop()

    async def stop(self) -> None:
        """Begin no further request, and wait for the ends of those in progress. May be repeated."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        await asyncio.gather(*self._open, return_exceptions=True)

    @property
    def errors(self) -> Counter[str]:
        """Requests that were not answered in full, by `code`."""
        return Counter(outcome.code for outcome in self.outcomes if outcome.code is not None)

    async def _send(self) -> None:
        began = time.monotonic()
        for number in count():
            await asyncio.sleep(began + number * self._interval_s - time.monotonic())
            await self._slots.acquire()
            task = asyncio.create_task(self._one(number))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._slots.release()

    async def _one(self, number: int) -> None:
        request = CompletionRequest(
            model=self._model,
            prompt=f"{_PROMPT}Number {number}:",
            output_len=self._max_tokens,
            api_key=self._api_key,
            request_id=f"drill-{uuid4().hex}",
            stream=is_streamed(number, self._stream_share),
        )
        record, started_s = StreamRecord(request), time.monotonic()
        base_url, timed_out = self._base_urls[number % len(self._base_urls)], False
        try:
            async with asyncio.timeout(self._timeout_s):
                await stream_completion(base_url, request, record)
        except TimeoutError:
            timed_out = True
        outcome = outcome_of(record, started_s, time.monotonic(), timed_out=timed_out)
        self.outcomes.append(replace(outcome, base_url=base_url))


def is_streamed(number: int, share: float) -> bool:
    """Whether the request of this number is streamed, so that `share` of any many successive ones are."""
    return int((number + 1) * share) > int(number * share)


def outcome_of(
    record: StreamRecord, started_s: float, ended_s: float, *, timed_out: bool = False
) -> RequestOutcome:
    """What became of the request of `record`, which has ended or timed out."""
    completion = decode(record)
    complete = completion.complete and not timed_out
    usage = ReportedUsage(
        completion.prompt_tokens,
        completion.cached_tokens,
        completion.output_tokens,
        completion.reasoning_tokens,
    )
    return RequestOutcome(
        request_id=record.request.request_id,
        started_s=started_s,
        ended_s=ended_s,
        status=record.status,
        code=None if complete else CLIENT_TIMEOUT if timed_out else _code(record, completion),
        complete=complete,
        usage=usage if complete else None,
        deliveries=len(completion.token_times),
        first_token_s=next(iter(completion.token_times), None) if record.request.stream else None,
        retry_after=record.retry_after,
    )


def _code(record: StreamRecord, completion: Completion) -> str:
    if completion.error_code is not None:
        return completion.error_code
    if record.status == 0:
        return NO_CONNECTION
    return CONNECTION_LOST if record.status == 200 else f"http_{record.status}"


def recovery_s(outcomes: Sequence[RequestOutcome], fault_began_s: float) -> float | None:
    """Seconds from the begin of the fault until the end of the first success after which no request fails.

    The success is of a request begun after the fault did, so a service that only stood still has not recovered before it goes on.
    None if there is none.
    """
    failed = [each.ended_s for each in outcomes if not each.complete and each.ended_s >= fault_began_s]
    after = max(failed, default=fault_began_s)
    ends = [
        each.ended_s
        for each in outcomes
        if each.complete and each.started_s >= fault_began_s and each.ended_s > after
    ]
    return min(ends) - fault_began_s if ends else None
