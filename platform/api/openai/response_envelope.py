"""The fields that all objects and chunks of one response share: id, kind, time and model, encoded once, and token usage.

A prompt counts once in `usage`, however many choices it has.
"""

from dataclasses import dataclass

import msgspec

from loraplex.platform.observability.request_stats import RequestStats


def usage_of(stats: RequestStats) -> dict[str, object]:
    """Build `usage`: `prompt_tokens`, `completion_tokens`, their sum, and the cached part of the prompt."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """`created` in seconds of the Unix epoch."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prefix(self, kind: str) -> bytes:
        """Encode the beginning of an SSE event, up to the comma after these fields."""
        return b"data: " + msgspec.json.encode(self.fields(kind))[:-1] + b","


def event_of(chunk: dict[str, object]) -> bytes:
    """Encode one whole SSE event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
