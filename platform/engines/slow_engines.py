"""Which engines of a pool are slower than their fellows (gray failure): they get fewer requests, then trials alone, and come back.

Invariants: at most half of the engines have less than a whole share. Only reviews in a row change one, and what a request waits for
its own adapter or grammar is no fault of its engine.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import randrange
from statistics import median
from typing import Final
from uuid import uuid4

import structlog

from loraplex.engine.messages import Delta, EngineRequest, Event, Started
from loraplex.engine.sampling_params import SamplingParams

REVIEW_S: Final = 5.0
MEMORY_S: Final = 30.0
REVIEWS: Final = 3
"""In a row, that find an engine slow, or not, before its share changes."""
MIN_SAMPLES: Final = 5
SLOW: Final = 2.0
"""From so many times the median of its fellows on, an engine is slow."""
RECOVERED: Final = 1.25
"""Below it an engine without requests has recovered: it has trials alone, and its fellows have all the load."""
REDUCED_SHARE: Final = 0.25
TRIAL_S: Final = 2.0
TRIAL_PROMPT: Final = 64
MIN_FIRST_S: Final = 0.05
MIN_GAP_S: Final = 0.005
"""Smaller differences of the time to a first token and between tokens are noise."""
SHORT_PROMPT: Final = 256
"""Tokens. A prompt of so many computed ones counts for two of none: what does not grow with a prompt takes about as long."""
GAP_TOKENS: Final = 16
NAMESPACE_BYTES: Final = 32
LOG: Final = structlog.get_logger("loraplex.slow_engines")


@dataclass(slots=True)
class _Pace:
    """What was measured of one engine: (moment, seconds), newest last. `reviews` in a row found it slow, or not."""

    firsts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=64))
    is_slow: bool = False
    reviews: int = 0
    share: float = 1.0
    slowness: float = 1.0


class SlowEngines:
    """Compares the engines of one gateway by their requests. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paces: dict[int, _Pace] = {}
        self._next_review = clock() + REVIEW_S

    def watch(self, number: int, request: EngineRequest) -> "RequestWatch":
        """Return what follows a request that goes to an engine."""
        return RequestWatch(self._paces.setdefault(number, _Pace()), request, self._clock)

    def share(self, number: int) -> float:
        """The part of its usual requests that an engine gets: 1, `REDUCED_SHARE` or 0."""
        pace = self._paces.get(number)
        return 1.0 if pace is None else pace.share

    def slowness(self, number: int) -> float:
        """How many times as long as its fellows an engine took in the last review."""
        pace = self._paces.get(number)
        return 1.0 if pace is None else pace.slowness

    def review(self, numbers: Collection[int], engines_wanted: Callable[[], int]) -> bool:
        """Compare the engines, if it is time to; whether a share has changed. Those that are not among `numbers` are forgotten.

        While more `engines_wanted` than have a whole share, none is left out.
        """
        now = self._clock()
        if now < self._next_review:
            return False
        self._next_review = now + REVIEW_S
        self._paces = {number: pace for number, pace in self._paces.items() if number in numbers}
        before = {number: pace.share for number, pace in self._paces.items()}
        firsts, gaps, wanted = self._medians("firsts", now), self._medians("gaps", now), engines_wanted()
        for number, pace in self._paces.items():
            ratios = _ratio(number, firsts, MIN_FIRST_S), _ratio(number, gaps, MIN_GAP_S)
            known = [each for each in ratios if each is not None]
            if known:
                self._judge(number, pace, max(known), wanted)
        return before != {number: pace.share for number, pace in self._paces.items()}

    def _medians(self, measure: str, now: float) -> dict[int, float]:
        """By engine with enough samples of the last `MEMORY_S`."""
        found = {}
        for number, pace in self._paces.items():
            samples = [seconds for at, seconds in getattr(pace, measure) if at > now - MEMORY_S]
            if len(samples) >= MIN_SAMPLES:
                found[number] = median(samples)
        return found

    def _judge(self, number: int, pace: _Pace, slowness: float, wanted: int) -> None:
        is_slow = slowness >= (SLOW if pace.share else RECOVERED)
        pace.reviews = pace.reviews + 1 if is_slow == pace.is_slow else 1
        pace.is_slow, pace.slowness = is_slow, slowness
        if pace.reviews < REVIEWS:
            return
        whole = sum(each.share == 1.0 for each in self._paces.values())
        if is_slow and pace.share == 1.0:
            if 2 * (whole - 1) >= len(self._paces):
                self._change(number, pace, REDUCED_SHARE)
        elif is_slow:
            share = 0.0 if whole >= wanted else REDUCED_SHARE
            if share != pace.share:
                self._change(number, pace, share)
        elif pace.share < 1.0:
            self._change(number, pace, 1.0 if pace.share else REDUCED_SHARE)

    def _change(self, number: int, pace: _Pace, share: float) -> None:
        """Set a share, and begin to measure anew."""
        pace.share, pace.reviews = share, 0
        pace.firsts.clear()
        pace.gaps.clear()
        write = LOG.info if share == 1.0 else LOG.warning
        write("engine's share changed", engine=number, share=share, slowness=round(pace.slowness, 2))


def trial_request(vocab_size: int) -> EngineRequest:
    """A short request of no tenant to an engine that gets few of tenants, with a prompt that no cache has."""
    return EngineRequest(
        request_id=f"trial-{uuid4().hex}",
        namespace=bytes(NAMESPACE_BYTES),
        prompt_token_ids=[randrange(vocab_size) for _ in range(TRIAL_PROMPT)],
        sampling=SamplingParams(max_tokens=2 * GAP_TOKENS + 1, ignore_eos=True, seed=0),
        total_timeout_s=MEMORY_S,
    )


class RequestWatch:
    """Times the events of one request on one engine."""

    def __init__(self, pace: _Pace, request: EngineRequest, clock: Callable[[], float]) -> None:
        self._pace = pace
        self._prompt = len(request.prompt_token_ids)
        self._clock = clock
        self._at = clock()
        self._waited_s = 0.0
        # A response that another engine began is computed again before its next token.
        self._is_whole = not request.received
        self._has_token = False
        self._tokens = 0

    def see(self, event: Event) -> None:
        """Take the time of an event. Of several choices the first one counts."""
        if isinstance(event, Started):
            self._prompt = max(0, self._prompt - event.cached_tokens)
            self._waited_s = event.grammar_s + event.adapter_s
        elif isinstance(event, Delta) and event.choice == 0:
            now = self._clock()
            self._tokens += len(event.token_ids)
            if not self._has_token:
                seconds = (now - self._at - self._waited_s) / (1 + self._prompt / SHORT_PROMPT)
                if self._is_whole:
                    self._pace.firsts.append((now, max(seconds, 0.0)))
                self._has_token = True
            elif self._tokens >= GAP_TOKENS:
                self._pace.gaps.append((now, (now - self._at) / self._tokens))
            else:
                return
            self._at, self._tokens = now, 0


def _ratio(number: int, medians: dict[int, float], least_s: float) -> float | None:
    """How many times as long as its fellows an engine takes; None without a comparison, 1 for a difference below `least_s`."""
    others = [seconds for other, seconds in medians.items() if other != number]
    if number not in medians or not others:
        return None
    own, usual = medians[number], median(others)
    return 1.0 if own - usual < least_s else own / max(usual, least_s)
