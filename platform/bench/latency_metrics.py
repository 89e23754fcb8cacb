"""Throughput, TTFT, TPOT, ITL and goodput of a load, under the field names of vLLM's serving benchmark."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev

import numpy as np

from loraplex.platform.bench.client import Completion
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.startup_errors import SettingsError

PERCENTILES = (50, 95, 99)
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_OBJECTIVE = re.compile(rf"({'|'.join(GOODPUT_METRICS)}):(\d+(?:\.\d+)?)")


def percentile(values: Sequence[float], share: float) -> float:
    """The `share` (0-100) percentile with linear interpolation; 0.0 of no values."""
    return float(np.percentile(values, share)) if values else 0.0


def time_per_output_token(completion: Completion) -> float | None:
    """Seconds per token after the first; None if there was no second one."""
    if completion.output_tokens < 2 or len(completion.token_times) < 2:
        return None
    return (completion.token_times[-1] - completion.token_times[0]) / (completion.output_tokens - 1)


def inter_token_latencies(completion: Completion) -> list[float]:
    """Seconds between successive pieces of text."""
    return [after - before for before, after in pairwise(completion.token_times)]


def parse_goodput(text: str | None) -> dict[str, float]:
    """Parse `ttft:500,tpot:60` into milliseconds by metric. Raises `SettingsError`."""
    objectives: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None:
            raise SettingsError(f"--goodput {part!r}: allowed is METRIC:MS with {', '.join(GOODPUT_METRICS)}")
        objectives[match[1]] = float(match[2])
    return objectives


def serving_metrics(result: LoadResult, objectives: Mapping[str, float] | None = None) -> dict[str, float]:
    """Rates per second, times in milliseconds. Cancelled and failed requests count only in their own fields."""
    done = [completion for completion in result.completions if completion.complete]
    cancelled = sum(not completion.complete and completion.error is None for completion in result.completions)
    tokens_in = sum(completion.prompt_tokens for completion in done)
    tokens_out = sum(completion.output_tokens for completion in done)
    figures = {
        "completed": len(done),
        "cancelled": cancelled,
        "failed": len(result.completions) - len(done) - cancelled,
        "duration": result.duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "total_cached_tokens": sum(completion.cached_tokens for completion in done),
        "request_throughput": len(done) / result.duration,
        "output_throughput": tokens_out / result.duration,
        "total_token_throughput": (tokens_in + tokens_out) / result.duration,
    }
    if objectives:
        good = sum(_meets(completion, objectives) for completion in done)
        figures["request_goodput"] = good / result.duration
    for name, values in latencies(done).items():
        figures |= _summary(name, values)
    return figures


def latencies(done: Sequence[Completion]) -> dict[str, list[float]]:
    """Seconds of every response, and `itl` of every gap, by metric."""
    per_token = (time_per_output_token(completion) for completion in done)
    return {
        "ttft": [completion.token_times[0] for completion in done if completion.token_times],
        "tpot": [value for value in per_token if value is not None],
        "itl": [gap for completion in done for gap in inter_token_latencies(completion)],
        "e2el": [completion.latency for completion in done],
    }


def _summary(name: str, seconds: Sequence[float]) -> Iterator[tuple[str, float]]:
    values = [value * 1000 for value in seconds] or [0.0]
    yield f"mean_{name}_ms", fmean(values)
    yield f"median_{name}_ms", median(values)
    yield f"std_{name}_ms", pstdev(values)
    for share in PERCENTILES:
        yield f"p{share}_{name}_ms", percentile(values, share)


def _meets(completion: Completion, objectives: Mapping[str, float]) -> bool:
    measured = {
        "ttft": completion.token_times[0] if completion.token_times else math.inf,
        "tpot": time_per_output_token(completion) or 0.0,
        "e2el": completion.latency,
    }
    return all(measured[name] * 1000 <= limit for name, limit in objectives.items())
