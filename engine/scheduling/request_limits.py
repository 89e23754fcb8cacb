"""Refuses requests that can never run, and finds requests whose deadlines have passed.

Invariant: whatever passes `RequestValidator.check` can run to its last token on an otherwise empty engine.
"""

import heapq
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.errors import PromptTooLong
from loraplex.engine.messages import DeadlineKind, EngineRequest, ScoreRequest
from loraplex.engine.sampling_params import MAX_SCORED_TOKENS, MAX_TOP_LOGPROBS, require, require_token_ids
from loraplex.engine.sequence_scores import scores_of


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """Checks requests. Sizes in tokens. `max_cache_tokens` is the size of the whole block pool."""

    max_model_len: int
    max_cache_tokens: int
    vocab_size: int

    def check(self, request: EngineRequest) -> None:
        """Raise `InvalidRequest` naming the field, or `PromptTooLong`, for a request that can never run."""
        prompt = request.prompt_token_ids
        require(bool(prompt), "prompt", "must hold at least 1 token")
        request.sampling.validate(self.vocab_size, scores=request.scores is not None)
        require(math.isfinite(request.weight) and request.weight > 0, "weight", "must be a positive number")
        for kind, seconds in request.timeouts.items():
            require(math.isfinite(seconds), kind, "must be a finite number of seconds")
        longest = 0
        if request.scores is not None:
            self._check_scores(request, request.scores)
            longest = max(map(len, request.scores.continuations), default=0)
        self._check_length(len(prompt) + longest, request.sampling.max_tokens)
        require_token_ids("prompt", prompt, self.vocab_size)
        for choice, received in request.received.items():
            fits = choice in range(request.sampling.n) and len(received) <= request.sampling.max_tokens
            require(fits, "received", "must hold choices of `n`, each of at most `max_tokens` tokens")
            require_token_ids("received", received, self.vocab_size)

    def _check_scores(self, request: EngineRequest, scores: ScoreRequest) -> None:
        """Raise `InvalidRequest` for scores that cannot be computed."""
        top, last = scores.prompt_logprobs, len(request.prompt_token_ids) - 1
        given = [*scores.token_ids.values(), *scores.continuations, scores.ending_ids]
        if top is not None:
            require(0 <= top <= MAX_TOP_LOGPROBS, "prompt_logprobs", "must lie in 0..{}", MAX_TOP_LOGPROBS)
        in_prompt = all(0 <= position <= last for position in scores.token_ids)
        require(in_prompt, "scores", "must have positions in 0..{}", last)
        fits = sum(map(len, given)) <= MAX_SCORED_TOKENS
        require(fits, "scores", "holds at most {} tokens", MAX_SCORED_TOKENS)
        for ids in given:
            require_token_ids("scores", ids, self.vocab_size)
        require(all(scores.continuations), "scores", "must not hold an empty continuation")
        writes, choices = request.sampling.max_tokens > 0, len(scores.continuations)
        is_alone = not (writes or scores.token_ids or top is not None)
        require(is_alone or not choices, "scores", "has continuations alone, with `max_tokens` 0")
        is_bare = request.sampling.n == max(choices, 1) and request.grammar is None
        require(writes or is_bare, "n", "must be {} with `max_tokens` 0, without a grammar", max(choices, 1))

    def _check_length(self, prompt: int, max_tokens: int) -> None:
        limit = min(self.max_model_len, self.max_cache_tokens)
        if prompt + max_tokens > limit:
            raise PromptTooLong(limit, prompt, max_tokens)


def new_sequences(request: EngineRequest, arrival: float, order: int) -> list[Sequence]:
    """Create the open choices of a request, with one seed for all, drawn if the request has none. Choice c has number `order` + c."""
    seed = request.sampling.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little") >> 1
    return [
        Sequence(
            request=request,
            choice=choice,
            arrival=arrival,
            seed=seed,
            token_ids=[
                *request.prompt_token_ids,
                *request.continuation(choice),
                *request.received.get(choice, ()),
            ],
            order=order + choice,
            scores=scores_of(request, choice),
            num_continuation_tokens=len(request.continuation(choice)),
            leads=index == 0,
        )
        for index, choice in enumerate(request.open_choices)
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
