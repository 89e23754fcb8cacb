"""Figures of a load under the field names of vLLM's serving benchmark, so that existing tools can read them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev

from loraplex.platform.bench.client import Answer
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.startup_errors import SettingsError

PERCENTILES = (50, 95, 99)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_OBJECTIVE = re.compile(rf"({'|'.join(GOODPUT_METRICS)}):(\d+(?:\.\d+)?)")


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` (0-100) percentile with linear interpolation between neighbours; 0.0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_per_output_token(answer: Answer) -> float | None:
    """Seconds per token after the first; None when there was no second one."""
    if answer.output_tokens < 2 or len(answer.token_times) < 2:
        return None
    return (answer.token_times[-1] - answer.token_times[0]) / (answer.output_tokens - 1)


def inter_token_gaps(answer: Answer) -> list[float]:
    """Seconds between successive pieces of text."""
    return [after - before for before, after in pairwise(answer.token_times)]


def parse_objectives(text: str | None) -> dict[str, float]:
    """`ttft:500,tpot:60` -> milliseconds by metric. Raises `SettingsError`."""
    objectives: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None:
            raise SettingsError(f"--goodput {part!r}: allowed is METRIC:MS with {', '.join(GOODPUT_METRICS)}")
        objectives[match[1]] = float(match[2])
    return objectives


def serving_figures(result: LoadResult, objectives: Mapping[str, float] | None = None) -> dict[str, float]:
    """Rates per second, times in milliseconds. Cancelled and failed requests count only in their own fields."""
    done = [answer for answer in result.answers if answer.complete]
    cancelled = sum(not answer.complete and answer.error is None for answer in result.answers)
    tokens_in = sum(answer.prompt_tokens for answer in done)
    tokens_out = sum(answer.output_tokens for answer in done)
    figures = {
        "completed": len(done),
        "cancelled": cancelled,
        "failed": len(result.answers) - len(done) - cancelled,
        "duration": result.duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(answer.cached_tokens for answer in done),
        "request_throughput": len(done) / result.duration,
        "output_throughput": tokens_out / result.duration,
        "total_token_throughput": (tokens_in + tokens_out) / result.duration,
    }
    if objectives:
        good = sum(_meets(answer, objectives) for answer in done)
        figures["request_goodput"] = good / result.duration
    for name, values in _samples(done).items():
        figures |= _summary(name, values)
    return figures


def _samples(done: Sequence[Answer]) -> dict[str, list[float]]:
    per_token = (time_per_output_token(answer) for answer in done)
    return {
        "ttft": [answer.token_times[0] for answer in done if answer.token_times],
        "tpot": [value for value in per_token if value is not None],
        "itl": [gap for answer in done for gap in inter_token_gaps(answer)],
        "e2el": [answer.latency for answer in done],
    }


def _summary(name: str, seconds: Sequence[float]) -> Iterator[tuple[str, float]]:
    values = [value * 1000 for value in seconds] or [0.0]
    yield f"mean_{name}_ms", fmean(values)
    yield f"median_{name}_ms", median(values)
    yield f"std_{name}_ms", pstdev(values)
    for share in PERCENTILES:
        yield f"p{share}_{name}_ms", percentile(values, share)


def _meets(answer: Answer, objectives: Mapping[str, float]) -> bool:
    measured = {
        "ttft": answer.token_times[0] if answer.token_times else math.inf,
        "tpot": time_per_output_token(answer) or 0.0,
        "e2el": answer.latency,
    }
    return all(measured[name] * 1000 <= limit for name, limit in objectives.items())
