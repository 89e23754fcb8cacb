"""The fields that all objects and chunks of one response share: id, time and model; token usage; and the frame of a chunk.

A prompt counts once in `usage`, however many choices it has.
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from loraplex.platform.errors import ClientError
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.web.openai.response_models import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
    encoded,
)

DONE: Final = b"data: [DONE]\n\n"
_NULL: Final = b"null"


def usage_of(stats: RequestStats) -> Usage:
    """Return the tokens that a request has used so far."""
    usage = counted_usage(stats.prompt_tokens, stats.completion_tokens, stats.cached_tokens)
    if stats.thought_counter is None:
        return usage
    details = CompletionTokensDetails(reasoning_tokens=stats.reasoning_tokens)
    return usage.model_copy(update={"completion_tokens_details": details})


def counted_usage(prompt: int, completion: int, cached: int) -> Usage:
    """Return numbers of tokens; `cached`: those of the prompt that were in the prefix cache."""
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`created` in seconds of the Unix epoch."""

    id: str
    created: int
    model: str

    def fields(self, stats: RequestStats) -> dict[str, Any]:
        """Return what all objects of a response have."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": stats.system_fingerprint,
        }


def event_of(chunk: BaseModel) -> bytes:
    """Encode one whole SSE event."""
    return b"data: " + encoded(chunk) + b"\n\n"


def error_event(error: ClientError) -> bytes:
    """Encode an SSE event named `error` with the OpenAI error object."""
    return b"event: error\ndata: " + msgspec.json.encode(error.body()) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """The event of a chunk of one choice, cut where its members begin, and at its log-probabilities and `finish_reason`.

    `before` has the beginning of each choice, `running` the end of a chunk that has neither of the two.
    """

    before: list[bytes]
    to_logprobs: bytes
    to_reason: bytes
    end: bytes
    running: bytes

    def event(self, choice: int, members: bytes, logprobs: bytes = _NULL, reason: bytes = _NULL) -> bytes:
        """Build an event of encoded parts."""
        ending = self.to_logprobs + logprobs + self.to_reason + reason + self.end
        return self.before[choice] + members + ending


def frame_of(chunk: BaseModel, members: bytes, choices: int) -> ChunkFrame:
    """Cut the event of a chunk of choice 0 without log-probabilities and reason at `members`, where they occur last."""
    before, _, running = event_of(chunk).rpartition(members)
    to_logprobs, to_reason, end = running.split(_NULL, 2)
    start, _, rest = before.rpartition(b"0")
    befores = [start + b"%d" % choice + rest for choice in range(choices)]
    return ChunkFrame(befores, to_logprobs, to_reason, end, running)
