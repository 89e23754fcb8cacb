"""What the counters should say, in plain Python: sums over all requests ever admitted. Times in seconds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from uuid import UUID

from loraplex.tenants.counters.snapshot import PeriodTotal
from loraplex.tenants.quotas.limits import BUDGETS, COUNTED, LimitName, Subject
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest

TOLERANCE = 1e-6


@dataclass
class ModelRequest:
    """One admitted request; `used` is None while it is open. `end` is that of its lease."""

    request: ReservationRequest
    reserved: Reservation
    at: float
    end: float
    used: tuple[int, int] | None = None
    ended_at: float = inf
    given_back: bool = False
    # Counters that were rebuilt do not know what the request took.
    is_restored: bool = False

    @property
    def tokens(self) -> int:
        return self.request.tokens if self.used is None else self.used[0]


@dataclass
class Bucket:
    """A leaky bucket in floating point: what it lacks at one time."""

    limit: int
    debt: float
    at: float

    def debt_at(self, time: float) -> float:
        return max(0.0, self.debt - max(0.0, time - self.at) * self.limit / 60)

    def add(self, amount: float, time: float) -> None:
        self.debt, self.at = min(self.limit, self.debt_at(time) + amount), time

    def give_back(self, admitted_at: float, time: float) -> None:
        """One request, less what has flowed back since its admission."""
        lacking = max(0.0, 1 - (time - admitted_at) * self.limit / 60)
        self.debt, self.at = max(0.0, self.debt_at(time) - lacking), time

    def empty(self, time: float) -> None:
        self.debt, self.at = self.limit, time


@dataclass
class CounterModel:
    requests: dict[UUID, ModelRequest] = field(default_factory=dict)
    buckets: dict[tuple[UUID, str], Bucket] = field(default_factory=dict)
    # After a loss, buckets may lack more than here: requests that ended meanwhile count from the last end on.
    after_loss: bool = False

    def of(self, subject: Subject) -> Iterator[ModelRequest]:
        """The requests that count for it: those of a group for its root, too."""
        return (
            each
            for each in self.requests.values()
            if subject.counter in [found.counter for found in each.request.subjects]
        )

    def open(self) -> list[ModelRequest]:
        return [each for each in self.requests.values() if each.used is None]

    def bucket(self, subject: Subject, name: str) -> Bucket:
        limit = subject.limits.get(name)
        assert limit is not None
        return self.buckets.setdefault((subject.id, name), Bucket(limit, 0.0, 0.0))

    def limited(self, name: LimitName, request: ReservationRequest) -> list[Subject]:
        return [subject for subject in request.subjects if subject.limits.get(name) is not None]

    def admit(self, admitted: ModelRequest) -> None:
        self.requests[admitted.request.id] = admitted
        for subject in self.limited("requests_per_minute", admitted.request):
            self.bucket(subject, "requests_per_minute").add(1, admitted.at)

    def settle(self, found: ModelRequest, tokens: int, amount_nano: int, time: float) -> None:
        found.used, found.ended_at = (tokens, amount_nano), time
        for subject in self.limited("tokens_per_minute", found.request):
            self.bucket(subject, "tokens_per_minute").add(tokens, time)

    def give_back(self, found: ModelRequest, time: float) -> None:
        """It was refused before anything ran."""
        self.settle(found, 0, 0, time)
        found.given_back = not found.is_restored
        if found.given_back:
            for subject in self.limited("requests_per_minute", found.request):
                self.bucket(subject, "requests_per_minute").give_back(found.at, time)

    def lose(self, subjects: list[Subject], time: float) -> None:
        """All counters are rebuilt: buckets start empty."""
        self.after_loss = True
        for subject in subjects:
            for name in ("requests_per_minute", "tokens_per_minute"):
                if subject.limits.get(name) is not None:
                    self.bucket(subject, name).empty(time)

    def expected(self, subject: Subject, name: LimitName, period: str, time: float) -> tuple[float, int]:
        """(used, reserved) of one limit; for rates used is not rounded."""
        mine = [*self.of(subject)]
        if name == "requests_per_minute":
            return self.bucket(subject, name).debt_at(time), 0
        if name == "tokens_per_minute":
            return self.bucket(subject, name).debt_at(time), sum(
                each.tokens for each in mine if each.used is None
            )
        if name == "concurrent_requests":
            running = [each for each in mine if each.used is None and each.end > time]
            return sum(each.request.sequences for each in running), 0
        used, reserved = self.in_period(subject, name, period)
        return (-(-used // 1000), -(-reserved // 1000)) if name in BUDGETS else (used, reserved)

    def in_period(self, subject: Subject, name: LimitName, period: str) -> tuple[int, int]:
        """(settled, reserved) of a day or a month; budgets in nano-units."""
        mine = [each for each in self.of(subject) if period in (each.reserved.day, each.reserved.month)]
        if name in BUDGETS:
            reserved = sum(each.request.amount_nano for each in mine if each.used is None)
            return sum(each.used[1] for each in mine if each.used), reserved
        reserved = sum(each.request.tokens for each in mine if each.used is None)
        return sum(each.used[0] for each in mine if each.used), reserved

    def totals(self, subjects: list[Subject]) -> tuple[PeriodTotal, ...]:
        """What PostgreSQL would have: the settled use of each subject in each period."""
        sums: dict[tuple[str, UUID, str], list[int]] = {}
        for subject in subjects:
            for each in self.of(subject):
                for period in (each.reserved.day, each.reserved.month):
                    total = sums.setdefault((subject.level, subject.id, period), [0, 0])
                    total[0] += each.used[0] if each.used else 0
                    total[1] += each.used[1] if each.used else 0
        return tuple(PeriodTotal(*key, *total) for key, total in sums.items())

    def check_limits(self, subjects: list[Subject], periods: tuple[str, str], time: float) -> None:
        """Settled plus open is within every limit; and every window of every bucket."""
        for subject in subjects:
            for name in COUNTED:
                limit = subject.limits.get(name)
                if limit is None:
                    continue
                if name.endswith("_per_minute"):
                    self.check_windows(subject, name, limit, lambda each: each.at)
                elif name == "concurrent_requests":
                    assert sum(self.expected(subject, name, "", time)) <= limit
                else:
                    factor = 1000 if name in BUDGETS else 1
                    period = periods[name.endswith("_per_month")]
                    assert sum(self.in_period(subject, name, period)) <= limit * factor, name

    def check_windows(
        self, subject: Subject, name: str, limit: int, counted_at: Callable[[ModelRequest], float]
    ) -> None:
        """At most L (1 + t/60) in any t seconds, less those that were given back."""
        mine = sorted((each for each in self.of(subject) if not each.given_back), key=counted_at)
        sizes = [each.tokens if name == "tokens_per_minute" else 1 for each in mine]
        for first in range(len(mine)):
            total = 0
            for last in range(first, len(mine)):
                total += sizes[last]
                seconds = counted_at(mine[last]) - counted_at(mine[first])
                assert total <= limit * (1 + seconds / 60) + TOLERANCE, (name, total, limit, seconds)
