"""Token counts of one answer, as the OpenAI API shows them. Each prompt counts once, however many choices it has."""

from loraplex.platform.observability.request_stats import RequestTimings


def usage_of(timings: RequestTimings) -> dict[str, object]:
    """`prompt_tokens`, `completion_tokens`, their sum, and the cached part of the prompt."""
    return {
        "prompt_tokens": timings.prompt_tokens,
        "completion_tokens": timings.completion_tokens,
        "total_tokens": timings.prompt_tokens + timings.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
    }
