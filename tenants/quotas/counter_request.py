"""What the counters are asked. Invariant: every amount is below 2^53, so that scripts compute with it exactly."""

import re
from dataclasses import dataclass
from uuid import UUID

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import MAX_INTEGER, Subject

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def check_amounts(tokens: int, amount_nano: int) -> None:
    """Raises `InvalidField`."""
    for name, value in (("tokens", tokens), ("amount_nano", amount_nano)):
        if not 0 <= value <= MAX_INTEGER:
            raise InvalidField(name, f"{name} must be between 0 and {MAX_INTEGER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterRequest:
    """One admission. `id` names its reservation: asking again with the same id changes nothing.

    `subjects`: the tenant, the key and, unless it is for the base model, the adapter, in this order. `tokens` and
    `amount_nano` are what the request may use at most. `request_id` is what a denial is explained by.
    """

    id: UUID
    tenant_id: UUID
    request_id: str
    policy_epoch: int
    subjects: tuple[Subject, ...]
    tokens: int
    amount_nano: int

    def __post_init__(self) -> None:
        levels = tuple(subject.level for subject in self.subjects)
        if levels not in (("tenant", "key"), ("tenant", "key", "adapter")):
            raise InvalidField("subjects", "subjects must be a tenant, a key and at most one adapter")
        if not REQUEST_ID.fullmatch(self.request_id):
            raise InvalidField("request_id", f"request_id must match {REQUEST_ID.pattern}")
        check_amounts(self.tokens, self.amount_nano)

    @property
    def api_key_id(self) -> UUID:
        return self.subjects[1].id

    @property
    def adapter_id(self) -> UUID | None:
        return self.subjects[2].id if len(self.subjects) == 3 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """An open reservation: what is held, for whom, and in which periods it was admitted.

    `epoch` is the one it was admitted under. None: it was admitted without the counters.
    """

    id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    tokens: int
    amount_nano: int
    day: str
    month: str
    epoch: int | None = None

    def __post_init__(self) -> None:
        check_amounts(self.tokens, self.amount_nano)


@dataclass(frozen=True, slots=True)
class Actual:
    """What a request really used."""

    tokens: int
    amount_nano: int

    def __post_init__(self) -> None:
        check_amounts(self.tokens, self.amount_nano)


NOTHING_USED = Actual(0, 0)


@dataclass(frozen=True, slots=True)
class PeriodTotal:
    """What a subject has settled in one period. The amounts may be larger than any limit."""

    level: str
    subject_id: UUID
    period: str
    tokens: int
    amount_nano: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """What the counters start from: PostgreSQL's totals of the periods around now, and all open reservations.

    `full_buckets` only when this tenant never had counters before. Otherwise buckets of counters that live go on; what lost
    ones had given out nobody knows, so they start empty.
    """

    policy_epoch: int
    totals: tuple[PeriodTotal, ...]
    holds: tuple[Hold, ...]
    full_buckets: bool = False
