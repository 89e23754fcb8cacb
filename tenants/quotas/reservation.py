"""What a request reserves of its limits and what it used: as callers, counters and the ledger see it.

Invariant: a reservation carries all that its settlement needs. Amounts are in nano- or pico-units of money.
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


def check_amounts(tokens: int, amount_nano: int, sequences: int = 1) -> None:
    """Raises `InvalidField`."""
    for name, value in (("tokens", tokens), ("amount_nano", amount_nano), ("sequences", sequences)):
        if not 0 <= value <= MAX_INTEGER:
            raise InvalidField(name, f"{name} must be between 0 and {MAX_INTEGER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterReservation:
    """A request to the counters. `id` names its reservation: repeating it with the same id changes nothing.

    `subjects`: the tenant, the key and, unless it is for the base model, the adapter, in this order. `tokens` and
    `amount_nano` are upper bounds of what the request uses; `sequences`, its prompts times `n`, run at the same time. A denial
    is explained by `request_id`.
    """

    id: UUID
    tenant_id: UUID
    request_id: str
    policy_epoch: int
    subjects: tuple[Subject, ...]
    tokens: int
    amount_nano: int
    sequences: int = 1

    def __post_init__(self) -> None:
        levels = tuple(subject.level for subject in self.subjects)
        if levels not in (("tenant", "key"), ("tenant", "key", "adapter")):
            raise InvalidField("subjects", "subjects must be a tenant, a key and at most one adapter")
        if not REQUEST_ID.fullmatch(self.request_id):
            raise InvalidField("request_id", f"request_id must match {REQUEST_ID.pattern}")
        check_amounts(self.tokens, self.amount_nano, self.sequences)

    @property
    def api_key_id(self) -> UUID:
        return self.subjects[1].id

    @property
    def adapter_id(self) -> UUID | None:
        return self.subjects[2].id if len(self.subjects) == 3 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedAmounts:
    """The amounts of an open reservation, their subjects, and the periods of its admission.

    `epoch`: the one it was admitted under; None if it was admitted without the counters.
    """

    id: UUID
    api_key_id: UUID
    adapter_id: UUID | None
    tokens: int
    amount_nano: int
    day: str
    month: str
    epoch: int | None = None
    sequences: int = 1

    def __post_init__(self) -> None:
        check_amounts(self.tokens, self.amount_nano, self.sequences)


@dataclass(frozen=True, slots=True)
class ActualUsage:
    """What a request used."""

    tokens: int
    amount_nano: int

    def __post_init__(self) -> None:
        check_amounts(self.tokens, self.amount_nano)


NOTHING_USED = ActualUsage(0, 0)


Outcome = Literal["completed", "aborted", "failed"]
# Called when a request is admitted provisionally: by the counters, not yet by the ledger; perhaps more than once.
OnProvisional: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A request for admission. `id` is a UUIDv7 used once; the client knows `request_id`. Token counts are upper bounds.
    `sequences`: its prompts times `n`.
    """

    id: UUID
    request_id: str
    key: AuthenticatedKey
    adapter_id: UUID | None = None
    adapter_version: int | None = None
    digest: str | None = None
    prompt_tokens: int
    completion_tokens: int
    sequences: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An admitted request. `degraded`: admitted by this gateway's share of the limits, without the counters."""

    id: UUID
    tenant_id: UUID
    reserved: ReservedAmounts
    adapter_version: int | None
    digest: str | None
    admitted_at: datetime
    rate: RateState
    degraded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledUsage:
    """The usage of an ended request; `prompt_tokens` includes `cached_tokens`."""

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
    """A reservation as the ledger stores it. `epoch` is that of the counters that admitted it; None without counters."""

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
    sequences: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerUsage:
    """Usage as the ledger stores it. `outcome` None: cancelled; the reservation is removed and no record is written."""

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
        """The id for usage that arrives after the request was given up; derived from `id`, so always the same."""
        return uuid5(self.id, LATE)
