"""This gateway's share of the rates and of the concurrency, for when the counters cannot be asked.

Invariant: a share is floor(limit / live gateways), so all shares together never exceed the limit. A rate is a bucket as
the counters have it: a share of S per minute holds S and refills S / 60 per second; what open requests may use is held
aside, and paid when they end.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from loraplex.tenants.admission.limits import Subject
from loraplex.tenants.errors import RateLimited
from loraplex.tenants.rates import Rate, RateState

MOST_SUBJECTS = 100_000
RETRY_SECONDS = 1.0
NO_SHARE_RETRY_SECONDS = 30.0


@dataclass(slots=True)
class Bucket:
    """`lacking`: what has been taken and not refilled yet, as of `at`."""

    lacking: float = 0.0
    at: float = 0.0

    def refill(self, share: int, now: float) -> None:
        self.lacking = max(0.0, min(self.lacking, share) - (now - self.at) * share / 60)
        self.at = now


@dataclass(frozen=True, slots=True)
class FailedLimit:
    """`limit` is all of it, not this gateway's share."""

    name: str
    limit: int
    retry_after_s: float


@dataclass(slots=True)
class SubjectUse:
    """What one tenant, key or adapter uses of this gateway's share; `held`: tokens that running requests may use."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    running: set[UUID] = field(default_factory=set)
    held: int = 0


class LocalShare:
    """Of all tenants; `live_gateways` is set by whoever counts them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.live_gateways = 1
        self._clock = clock
        self._uses: OrderedDict[tuple[str, UUID], SubjectUse] = OrderedDict()
        self._running: dict[UUID, tuple[tuple[Subject, ...], int]] = {}

    def admit(self, admission_id: UUID, subjects: tuple[Subject, ...], tokens: int) -> RateState:
        """Takes from every limit or from none. Raises `RateLimited`."""
        now = self._clock()
        for subject in subjects:
            failed = self._failed(subject, self._use(subject, now), tokens)
            if failed is not None:
                raise self._refusal(subject, failed, self._rates(subjects, now))
        for subject in subjects:
            use = self._use(subject, now)
            use.requests.lacking += 1
            use.held += tokens
            use.running.add(admission_id)
        self._running[admission_id] = subjects, tokens
        return self._rates(subjects, now)

    def leave(self, admission_id: UUID, used_tokens: int) -> None:
        """The request has ended: it pays what it used. Harmless for one that was not admitted here."""
        subjects, tokens = self._running.pop(admission_id, ((), 0))
        now = self._clock()
        for subject in subjects:
            use = self._use(subject, now)
            if admission_id in use.running:
                use.running.discard(admission_id)
                use.held -= tokens
                use.tokens.lacking += used_tokens

    def share(self, limit: int) -> int:
        return limit // max(1, self.live_gateways)

    def _use(self, subject: Subject, now: float) -> SubjectUse:
        key = (subject.level, subject.id)
        use = self._uses.setdefault(key, SubjectUse())
        self._uses.move_to_end(key)
        use.requests.refill(self.share(subject.limits.requests_per_minute or 0), now)
        use.tokens.refill(self.share(subject.limits.tokens_per_minute or 0), now)
        while len(self._uses) > MOST_SUBJECTS:
            self._uses.popitem(last=False)
        return use

    def _failed(self, subject: Subject, use: SubjectUse, tokens: int) -> FailedLimit | None:
        limits = subject.limits
        most = limits.concurrent_requests
        if most is not None and len(use.running) >= self.share(most):
            return FailedLimit("concurrent_requests", most, RETRY_SECONDS)
        for name, limit, lacking, asked in (
            ("requests_per_minute", limits.requests_per_minute, use.requests.lacking, 1),
            ("tokens_per_minute", limits.tokens_per_minute, use.tokens.lacking + use.held, tokens),
        ):
            if limit is None:
                continue
            share = self.share(limit)
            if asked > share:
                return FailedLimit(name, limit, NO_SHARE_RETRY_SECONDS)
            missing = lacking + asked - share
            if missing > 0:
                return FailedLimit(name, limit, missing * 60 / share)
        return None

    def _refusal(self, subject: Subject, failed: FailedLimit, rate: RateState) -> RateLimited:
        return RateLimited(
            f"{failed.name} of the {subject.level} is {failed.limit}; while limits cannot be counted together, this "
            f"gateway gives out {self.share(failed.limit)} of it",
            limit=failed.name,
            level=subject.level,
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
                lacking = use.requests.lacking if kind == "requests" else use.tokens.lacking + use.held
                reset_s = lacking * 60 / share if share else 60.0
                rates.append(Rate(limit, max(0, int(share - lacking)), reset_s))
        return min(rates, key=lambda rate: rate.remaining, default=None)
