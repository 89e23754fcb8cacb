"""What one finished request tells the metrics: tokens and moments on one monotonic clock, in seconds."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, kw_only=True)
class RequestTimings:
    """Filled while a request runs. `queue_s` and `prefill_s` are the engine's: the longest of the request's prompts.

    `first_token` and `last_token` are None when none was delivered.

    `finish_reason` is the engine's, or `error`, or `abort` when the client left. `prompt_tokens` counts each prompt
    once however many choices it has; `completion_tokens` counts all choices, `largest_choice` the longest one. `token_gaps` are the times between
    successive tokens of one choice.
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

    def record(self, timings: RequestTimings) -> None: ...
