"""The response object around the output: what it repeats of the request, its state, and what it used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from loraplex.platform.errors import ClientError
from loraplex.platform.inference.generation import Generation
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.parameters.responses_request import ResponsesRequest

_REPEATED: Final = (
    *("model", "instructions", "parallel_tool_calls", "top_logprobs", "max_output_tokens"),
    *("max_tool_calls", "truncation", "metadata", "user", "safety_identifier", "prompt_cache_key"),
    *("tool_choice", "text", "reasoning"),
)
_DEFAULTS: Final = {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}}
_SAMPLED: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Envelope:
    """`request`: the fields that repeat the request, encoded once for all events that have them."""

    id: str
    created_at: int
    request: dict[str, msgspec.Raw]

    def document(
        self,
        status: str,
        generation: Generation,
        output: Sequence[dict[str, Any]] = (),
        *,
        completed_at: int | None = None,
        error: ClientError | None = None,
    ) -> dict[str, Any]:
        """Build the response object. `output`: the items that have ended."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": completed_at,
            "status": status,
            "error": None if error is None else _failure(error),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if status == "in_progress" else _usage(generation.stats),
            **self.request,
            **{name: getattr(generation.sampling, name) for name in _SAMPLED},
            "service_tier": "default",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }


def repeated(body: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Return the fields of a response that repeat its request."""
    given = body.model_dump(include={*_REPEATED}, by_alias=True, exclude_unset=True)
    fields = {name: getattr(body, name) for name in _REPEATED} | given
    fields |= {name: default | given.get(name, {}) for name, default in _DEFAULTS.items()}
    fields["tools"] = [tool.model_dump(by_alias=True) for tool in body.tools.offered]
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def _usage(stats: RequestStats) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }


def _failure(error: ClientError) -> dict[str, Any]:
    """Describe a failure by the codes that clients know: they repeat what failed for other reasons than the request."""
    row = error.row
    code = "rate_limit_exceeded" if row.status == 429 else "server_error"
    if row.status < 500 and row.status not in (422, 429):
        code = "invalid_prompt"
    return {"code": code, "message": error.message, "type": row.type, "param": error.param}
