"""Drives a server with requests: closed loop with a bounded concurrency, or open loop at given arrival times."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from loraplex.platform.bench.client import (
    Completion,
    CompletionRequest,
    StreamRecord,
    decode,
    stream_completion,
)
from loraplex.platform.bench.report import BenchFailed


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`completions` in the order of the requests; `duration` from the first request sent to the last end, in seconds."""

    requests: tuple[CompletionRequest, ...]
    completions: tuple[Completion, ...]
    duration: float

    @property
    def output_rate(self) -> float:
        """Output tokens per second, prefill and waiting included."""
        return sum(completion.output_tokens for completion in self.completions) / self.duration

    def require_complete(self) -> "LoadResult":
        """Return the result itself. Raises `BenchFailed` if a request failed or has fewer tokens than it asked for."""
        for request, completion in zip(self.requests, self.completions, strict=True):
            if not completion.complete or completion.output_tokens != request.output_len:
                reason = completion.error or f"{completion.output_tokens} of {request.output_len} tokens"
                raise BenchFailed(f"a request to {request.model} was not answered in full: {reason}")
        return self


async def run_load(
    base_url: str,
    requests: Sequence[CompletionRequest],
    concurrency: int | None = None,
    offsets: Sequence[float] | None = None,
    on_share: Callable[[float], None] = lambda _: None,
) -> LoadResult:
    """Send every request at its offset (seconds, default 0) while at most `concurrency` are in flight. `on_share`: how much has ended."""
    slots = asyncio.Semaphore(concurrency or max(len(requests), 1))
    began, ended_ones = time.perf_counter(), count(1)

    async def one(request: CompletionRequest, offset: float) -> StreamRecord:
        if (wait := offset - (time.perf_counter() - began)) > 0:
            await asyncio.sleep(wait)
        async with slots:
            record = await stream_completion(base_url, request)
        on_share(next(ended_ones) / len(requests))
        return record

    tasks = [one(request, offset) for request, offset in zip(requests, offsets or [0.0] * len(requests))]
    records = await asyncio.gather(*tasks)
    ended = max((record.ended_at for record in records), default=began)
    return LoadResult(tuple(requests), tuple(map(decode, records)), ended - began)
