"""Limits rates and concurrency by this gateway's share while the counters are unavailable.

Invariant: a share is floor(limit / live gateways), so all shares together never exceed the limit. Rates are buckets as in
the counters: a share of S per minute is a bucket of S that refills by S / 60 per second.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from cachetools import LRUCache

from loraplex.tenants.counters.counter_replies import Decision
from loraplex.tenants.errors import LimitExceeded, QuotaExhausted, RateLimited
from loraplex.tenants.quotas.limits import Level, LimitName, Subject
from loraplex.tenants.rate_state import Rate, RateState

MAX_SUBJECTS = 100_000
RETRY_SECONDS = 1.0
NO_SHARE_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class Bucket:
    """`lacking`: the amount taken and not refilled yet, as of `at`."""

    lacking: float = 0.0
    at: float = 0.0

    def refill(self, share: int, now: float) -> None:
        self.lacking = max(0.0, min(self.lacking, share) - (now - self.at) * share / 60)
        self.at = now


@dataclass(frozen=True, slots=True)
class TestedLimit:
    """One limit and a request. `share` is this gateway's part of `limit`; `asked` is added to `used` and `reserved`."""

    level: Level
    name: LimitName
    limit: int
    share: int
    used: float
    reserved: int
    asked: int

    @property
    def missing(self) -> float:
        return self.used + self.reserved + self.asked - self.share

    @property
    def passed(self) -> bool:
        return self.missing <= 0

    @property
    def retry_after_s(self) -> float | None:
        """Zero if it passed, None if it never can."""
        if self.passed or self.asked > self.limit:
            return 0.0 if self.passed else None
        if self.name == "concurrent_requests":
            return RETRY_SECONDS
        return NO_SHARE_RETRY_SECONDS if self.asked > self.share else self.missing * 60 / self.share

    def decision(self) -> Decision:
        """The decision as the counters would report it, with the share as the limit."""
        return Decision(
            level=self.level,
            name=self.name,
            limit=self.share,
            used=math.ceil(self.used),
            reserved=self.reserved,
            asked=self.asked,
            passed=self.passed,
            retry_after_s=self.retry_after_s,
        )


@dataclass(slots=True)
class SubjectUse:
    """What one tenant, key or adapter uses of this gateway's share. `running`: the sequences of each running request;
    `reserved`: tokens that these may use; the bucket pays at their end."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    running: dict[UUID, int] = field(default_factory=dict)
    reserved: int = 0


class LocalLimiter:
    """The shares of all tenants. The maintenance task counts the gateways."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.live_gateways = 1
        self._last_counted = 1
        self._clock = clock
        self._uses: LRUCache[tuple[str, UUID], SubjectUse] = LRUCache(MAX_SUBJECTS)
        self._running: dict[UUID, tuple[tuple[Subject, ...], int, float]] = {}

    def admit(
        self, admission_id: UUID, subjects: tuple[Subject, ...], tokens: int, sequences: int = 1
    ) -> RateState:
        """Take from every limit or from none. Raises `RateLimited`, or `QuotaExhausted` for more than any share allows."""
        now = self._clock()
        failed = [each for each in self._tested(subjects, tokens, sequences, now) if not each.passed]
        if failed:
            raise self._refusal(max(failed, key=_wait), self._rates(subjects, now))
        for subject in subjects:
            use = self._use(subject, now)
            use.requests.lacking += 1
            use.reserved += tokens
            use.running[admission_id] = sequences
        self._running[admission_id] = subjects, tokens, now
        return self._rates(subjects, now)

    def decisions(self, subjects: Sequence[Subject], tokens: int, sequences: int = 1) -> tuple[Decision, ...]:
        """The decisions of this gateway's shares on a request now."""
        return tuple(each.decision() for each in self._tested(subjects, tokens, sequences, self._clock()))

    def settle(self, admission_id: UUID, used_tokens: int, *, refused: bool = False) -> None:
        """End a request: its buckets pay what it used. No effect on a request that was not admitted here.

        A `refused` one is given back, less what has flowed back since its admission.
        """
        subjects, tokens, admitted_at = self._running.pop(admission_id, ((), 0, 0.0))
        now = self._clock()
        for subject in subjects:
            use = self._use(subject, now)
            if use.running.pop(admission_id, None) is not None:
                use.reserved -= tokens
                use.tokens.lacking += used_tokens
                if refused:
                    refilled = (now - admitted_at) * self.share(subject.limits.requests_per_minute or 0) / 60
                    use.requests.lacking = max(0.0, use.requests.lacking - max(0.0, 1.0 - refilled))

    def count_gateways(self, live: int) -> None:
        """Share with the larger of the last two counts: after an outage of PostgreSQL or a jump of its clock, the first one
        lacks all gateways that have not been seen since.
        """
        self.live_gateways, self._last_counted = max(live, self._last_counted), live

    def share(self, limit: int) -> int:
        return limit // max(1, self.live_gateways)

    def _use(self, subject: Subject, now: float) -> SubjectUse:
        use = self._uses.setdefault(subject.counter, SubjectUse())
        use.requests.refill(self.share(subject.limits.requests_per_minute or 0), now)
        use.tokens.refill(self.share(subject.limits.tokens_per_minute or 0), now)
        return use

    def _tested(
        self, subjects: Sequence[Subject], tokens: int, sequences: int, now: float
    ) -> list[TestedLimit]:
        tested: list[TestedLimit] = []
        for subject in subjects:
            use = self._use(subject, now)
            rows: tuple[tuple[LimitName, float, int, int], ...] = (
                ("concurrent_requests", sum(use.running.values()), 0, sequences),
                ("requests_per_minute", use.requests.lacking, 0, 1),
                ("tokens_per_minute", use.tokens.lacking, use.reserved, tokens),
            )
            for name, used, reserved, asked in rows:
                limit = subject.limits.get(name)
                if limit is not None:
                    share = self.share(limit)
                    tested.append(TestedLimit(subject.level, name, limit, share, used, reserved, asked))
        return tested

    def _refusal(self, failed: TestedLimit, rate: RateState) -> LimitExceeded:
        kind = QuotaExhausted if failed.retry_after_s is None else RateLimited
        return kind(
            f"{failed.name} of the {failed.level} is {failed.limit}; while limits cannot be counted together, this "
            f"gateway gives out {failed.share} of it",
            limit=failed.name,
            level=failed.level,
            limit_value=failed.limit,
            retry_after_s=failed.retry_after_s,
            rate=rate,
            degraded=True,
        )

    def _rates(self, subjects: Sequence[Subject], now: float) -> RateState:
        return RateState(self._tightest(subjects, "requests", now), self._tightest(subjects, "tokens", now))

    def _tightest(self, subjects: Sequence[Subject], kind: str, now: float) -> Rate | None:
        rates = []
        for subject in subjects:
            limit = subject.limits.get(f"{kind}_per_minute")
            if limit:
                share, use = self.share(limit), self._use(subject, now)
                lacking = use.requests.lacking if kind == "requests" else use.tokens.lacking + use.reserved
                reset_s = lacking * 60 / share if share else 60.0
                rates.append(Rate(limit, max(0, int(share - lacking)), reset_s))
        return min(rates, key=lambda rate: rate.remaining, default=None)


def _wait(failed: TestedLimit) -> float:
    return math.inf if failed.retry_after_s is None else failed.retry_after_s
