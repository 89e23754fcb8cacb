"""Tokens and timings of one request, counted from the engine's own events; moments in seconds on one monotonic clock.

Invariant: a token counts once the engine has reported it, whether or not a client reads the response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.engine.messages import Delta, Event, Failed, Finished, Started, Usage


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Statistics of a request, filled while it runs. `queue_s` and `prefill_s` are the engine's: the longest of its prompts.

    `first_token` and `last_token` are None when none was delivered.

    `finish_reason` is the engine's, or `error`, or `abort` when the client disconnected. `prompt_tokens` counts each prompt
    once, also with several choices; `completion_tokens` counts all choices, `largest_choice` the longest one. `token_gaps`
    are the times between successive tokens of one choice.
    """

    arrival: float
    n: int
    max_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    largest_choice: int = 0
    finish_reason: str = "abort"
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float = 0.0
    token_gaps: list[float] = field(default_factory=list)


class RequestRecorder(Protocol):
    """Receives every request that reached the engine, once."""

    def record(self, stats: RequestStats) -> None: ...


class UsageCounter:
    """Counts the events of one engine request per prompt.

    A prompt counts from its `Started` on; one that ends before counts as far as it was computed.
    """

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt_tokens = tuple(prompt_tokens)
        self._prefilled = [0] * len(self._prompt_tokens)
        self._cached = [0] * len(self._prompt_tokens)
        self._generated: dict[tuple[int, int], int] = {}
        self.finished = 0
        """Choices that ended without being aborted."""

    def see(self, prompt: int, event: Event) -> None:
        """Count an event of the request for `prompt`."""
        match event:
            case Started(cached_tokens=cached):
                self._count_prompt(prompt, self._prompt_tokens[prompt], cached)
            case Delta(choice=choice, token_ids=token_ids):
                key = (prompt, choice)
                self._generated[key] = self._generated.get(key, 0) + len(token_ids)
            case Finished(choice=choice, usage=usage):
                self._count_usage(prompt, choice, usage)
                self.finished += event.reason != "abort"
            case Failed():
                for choice, usage in event.usage.items():
                    self._count_usage(prompt, choice, usage)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that the engine computed or found in its cache."""
        return sum(self._prefilled)

    @property
    def cached_tokens(self) -> int:
        """The part of `prompt_tokens` that was in the prefix cache."""
        return sum(self._cached)

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(self._generated.values())

    def _count_usage(self, prompt: int, choice: int, usage: Usage) -> None:
        key = (prompt, choice)
        self._generated[key] = max(self._generated.get(key, 0), usage.completion_tokens)
        self._count_prompt(prompt, usage.prompt_tokens, usage.cached_tokens)

    def _count_prompt(self, prompt: int, tokens: int, cached: int) -> None:
        """Count a prompt once for all its choices: as far as the most advanced one."""
        tokens = min(tokens, self._prompt_tokens[prompt])
        if tokens > self._prefilled[prompt]:
            self._prefilled[prompt], self._cached[prompt] = tokens, min(cached, tokens)
