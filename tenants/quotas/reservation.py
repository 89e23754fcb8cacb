"""What a request reserves of its limits, and what it used in the end: in the caller's terms, the counters' and the ledger's.

Invariant: an admission carries all that settling it needs; nothing is looked up again. Amounts in nano- or pico-units of money.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID, uuid5

from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import MAX_INTEGER, Subject
from loraplex.tenants.rate_state import RateState

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")


def check_amounts(tokens: int, amount_nano: int) -> None:
    """Raises `InvalidField`."""
    for name, value in (("tokens", tokens), ("amount_nano", amount_nano)):
        if not 0 <= value <= MAX_INTEGER:
            raise InvalidField(name, f"{name} must be between 0 and {MAX_INTEGER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterReservation:
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
class ReservedAmounts:
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
class ActualUsage:
    """What a request really used."""

    tokens: int
    amount_nano: int

    def __post_init__(self) -> None:
        check_amounts(self.tokens, self.amount_nano)


NOTHING_USED = ActualUsage(0, 0)


Outcome = Literal["completed", "aborted", "failed"]
# Told when the counters have let a request in and the books do not have it yet; perhaps more than once.
OnProvisional: TypeAlias = Callable[[], None]


def not_told() -> None:
    """For whoever begins only what is in the books."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """`id` is a UUIDv7 and used once; `request_id` is what the client knows. Both counts are upper bounds."""

    id: UUID
    request_id: str
    key: AuthenticatedKey
    adapter_id: UUID | None = None
    adapter_version: int | None = None
    digest: str | None = None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A request that may run. `degraded`: by this gateway's share of the limits, without the counters."""

    id: UUID
    tenant_id: UUID
    hold: ReservedAmounts
    adapter_version: int | None
    digest: str | None
    admitted_at: datetime
    rate: RateState
    degraded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledUsage:
    """What a request used; `prompt_tokens` includes `cached_tokens`."""

    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def __post_init__(self) -> None:
        if not (0 <= self.cached_tokens <= self.prompt_tokens and self.completion_tokens >= 0):
            raise InvalidField("usage", "tokens must not be negative, nor more of them cached than prompted")


LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReservation:
    """What a request may use at most. `epoch` is that of the counters that admitted it; None when no counters did."""

    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    digest: str | None
    gateway_id: UUID
    prompt_tokens: int
    completion_tokens: int
    amount_nano: int
    day: str
    month: str
    admitted_at: datetime
    lease_s: float
    epoch: int | None
    policy_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerUsage:
    """What a request used. `outcome` None: it never began, so its reservation is taken back and nothing is written."""

    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    adapter_version: int | None = None
    digest: str | None
    outcome: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    amount_pico: int = 0
    day: str
    month: str
    admitted_at: datetime

    @property
    def late_id(self) -> UUID:
        """The id under which usage is written that arrives after the request was given up: always the same."""
        return uuid5(self.id, LATE)
