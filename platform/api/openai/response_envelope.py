"""The fields that all objects and chunks of one response share: id, time and model; token usage; and the frame of a chunk.

A prompt counts once in `usage`, however many choices it has.
"""

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from loraplex.platform.api.openai.response_models import PromptTokensDetails, Usage, encoded
from loraplex.platform.observability.request_stats import RequestStats

_NULL: Final = b"null"


def usage_of(stats: RequestStats) -> Usage:
    """Return the tokens that a request has used so far."""
    return Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.completion_tokens,
        total_tokens=stats.prompt_tokens + stats.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.cached_tokens),
    )


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`created` in seconds of the Unix epoch."""

    id: str
    created: int
    model: str


def event_of(chunk: BaseModel) -> bytes:
    """Encode one whole SSE event."""
    return b"data: " + encoded(chunk) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ChunkFrame:
    """The event of a chunk whose text is still missing: what precedes it for each choice, and what follows.

    Between `after_text` and `after_logprobs` come the log-probabilities; `running` is what follows a text without them.
    """

    before: list[bytes]
    after_text: bytes
    after_logprobs: bytes

    @property
    def running(self) -> bytes:
        return self.after_text + _NULL + self.after_logprobs


def frame_of(chunk: BaseModel, text: bytes, choices: int) -> ChunkFrame:
    """Cut the event of a chunk of choice 0 without log-probabilities at `text`, the last place where it occurs."""
    before, _, after = event_of(chunk).rpartition(text)
    after_text, _, after_logprobs = after.partition(_NULL)
    start, _, rest = before.rpartition(b"0")
    befores = [start + b"%d" % choice + rest for choice in range(choices)]
    return ChunkFrame(befores, after_text, after_logprobs)
