"""Refuses requests that can never run, and finds requests whose deadlines have passed.

Invariant: whatever passes `RequestValidator.check` can run to its last token on an otherwise empty engine.
"""

import heapq
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import InvalidRequest, PromptTooLong
from loraplex.engine.messages import DeadlineKind, EngineRequest


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Checks requests. Sizes in tokens. `max_cache_tokens` is the size of the whole block pool."""

    max_model_len: int
    max_cache_tokens: int
    vocab_size: int

    def check(self, request: EngineRequest) -> None:
        """Raise `InvalidRequest` naming the field, or `PromptTooLong`, for a request that can never run."""
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("prompt", "`prompt` must hold at least 1 token")
        request.sampling.validate(self.vocab_size)
        if not (math.isfinite(request.weight) and request.weight > 0):
            raise InvalidRequest("weight", "`weight` must be a positive number")
        for kind, seconds in request.timeouts.items():
            if not math.isfinite(seconds):
                raise InvalidRequest(kind, f"`{kind}` must be a finite number of seconds")
        self._check_length(len(prompt), request.sampling.max_tokens)
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise InvalidRequest("prompt", f"`prompt` must hold token ids in 0..{self.vocab_size - 1}")

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        limit = min(self.max_model_len, self.max_cache_tokens)
        if prompt + max_tokens > limit:
            raise PromptTooLong(limit, prompt, max_tokens)


def new_sequences(request: EngineRequest, arrival: float, order: int) -> list[Sequence]:
    """Create the `n` choices of a request, numbered from `order`, with one seed for all, drawn if the request has none."""
    seed = request.sampling.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little") >> 1
    return [
        Sequence(
            request=request,
            choice=choice,
            arrival=arrival,
            seed=seed,
            token_ids=list(request.prompt_token_ids),
            order=order + choice,
        )
        for choice in range(request.sampling.n)
    ]


class Deadlines:
    """Request ids by their deadlines. Entries of ended requests are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, DeadlineKind]] = []

    def add(self, request: EngineRequest, order: int, arrival: float) -> None:
        """`order` is the submission number of the request's first choice."""
        for kind, seconds in request.timeouts.items():
            heapq.heappush(self._heap, (arrival + seconds, order, request.request_id, kind))

    def due(self, now: float) -> Iterator[tuple[int, str, DeadlineKind]]:
        """Remove and yield (order, request id, kind) of everything due."""
        while self._heap and self._heap[0][0] <= now:
            _, order, request_id, kind = heapq.heappop(self._heap)
            yield order, request_id, kind
