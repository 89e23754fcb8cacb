"""What a request may use of its limits, what it has reserved of them, and what it used in the end.

Invariant: a reservation carries all that its settlement needs. Amounts are in nano- or pico-units of money.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias
from uuid import UUID

from loraplex.tenants.billing.pricing import Price, PriceVersion, amount_nano
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.limits import MAX_INTEGER, Level, LimitName, Subject
from loraplex.tenants.rate_state import RateState

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,200}")
SESSION: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
LEVELS: Final = tuple(
    ("tenant", *group, "key", *adapter) for group in ((), ("group",)) for adapter in ((), ("adapter",))
)
NO_REQUEST_ID: Final = "-"
NO_TIER: Final = "-"
NO_RATES: Final = RateState()

Outcome = Literal["completed", "aborted", "failed", "revoked", "unknown"]
# Called when a request is admitted provisionally: by the counters, not yet in the journal; perhaps more than once.
OnProvisional: TypeAlias = Callable[[], None]


def _check_amounts(**amounts: int) -> None:
    for name, value in amounts.items():
        if not 0 <= value <= MAX_INTEGER:
            raise InvalidField(name, f"{name} must be between 0 and {MAX_INTEGER}")


@dataclass(slots=True, kw_only=True)
class ReservationRequest:
    """A request for admission. `id` is a UUIDv7 that names its reservation: repeating the request changes nothing.

    Token counts and `amount_nano` are upper bounds of what it uses; `sequences`, its prompts times `n`, run at the same time.
    A denial is explained by `request_id`, which the client knows. `subjects`: the tenant, the group if the key is in one, the key
    and, unless it is for the base model, the adapter, in this order, with their limits; `limit_root`: the root of the group.
    `session`: the label of the session that it belongs to; `counts_session`: one of them limits its tokens.
    Admission sets these three and `amount_nano`, by `bound`, before anything is reserved; the rest never changes.
    `tier`, the tenant's, and `adapter_name`, None for the base model, choose the price. `alias`: None for a pinned version and the base.
    The ledger stores of open requests neither `subjects`, `limit_root`, `request_id`, `tier`, `adapter_name`, `policy_epoch`,
    which only an admission needs, nor session and alias. Raises `InvalidField`.
    """

    id: UUID
    tenant_id: UUID
    api_key_id: UUID
    adapter_id: UUID | None = None
    adapter_version: int | None = None
    digest: str | None = None
    request_id: str = NO_REQUEST_ID
    policy_epoch: int = 0
    tier: str = NO_TIER
    adapter_name: str | None = None
    prompt_tokens: int
    completion_tokens: int
    sequences: int = 1
    subjects: tuple[Subject, ...] = ()
    limit_root: UUID | None = None
    amount_nano: int = 0
    session: str | None = None
    counts_session: bool = False
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.subjects and tuple(subject.level for subject in self.subjects) not in LEVELS:
            raise InvalidField(
                "subjects", "subjects must be a tenant, at most one group, a key and at most one adapter"
            )
        if not REQUEST_ID.fullmatch(self.request_id):
            raise InvalidField("request_id", f"request_id must match {REQUEST_ID.pattern}")
        if self.session is not None and not SESSION.fullmatch(self.session):
            raise InvalidField("session", f"session must match {SESSION.pattern}, or be null")
        _check_amounts(tokens=self.tokens, amount_nano=self.amount_nano, sequences=self.sequences)

    def bound(self, subjects: tuple[Subject, ...], limit_root: UUID | None, amount_nano: int) -> None:
        """Set the limits that it counts for, and the most it can cost. Raises `InvalidField`."""
        _check_amounts(amount_nano=amount_nano)
        self.subjects, self.limit_root, self.amount_nano = subjects, limit_root, amount_nano
        self.counts_session = self.session is not None and any(
            subject.limits.tokens_per_session is not None for subject in subjects
        )

    @property
    def tokens(self) -> int:
        """The most tokens of prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def has_periods(self) -> bool:
        """Whether a limit per day, month or session holds for it: then it may not be admitted without the counters."""
        return self.counts_session or any(subject.limits.has_periods() for subject in self.subjects)


class LimitAtAdmission(NamedTuple):
    """One limit as an admitted request found it: `asked` is neither in `used` nor in `reserved`. Budgets in micro-units."""

    level: Level
    name: LimitName
    limit: int
    used: int
    reserved: int
    asked: int

    @property
    def left(self) -> int:
        """What the request left of it."""
        return self.limit - self.used - self.reserved - self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An admitted request, the periods (`day`, `month`) and the epoch of its admission.

    `price`: the one in force at `admitted_at`, by which it is settled; `NO_PRICE` of those read back from the ledger.
    `epoch`: that of the counters that admitted it; None where it is unknown. `degraded`: admitted by this gateway's share of the
    limits, without the counters; then `limits`, what it met of every limit, are those of the share.
    """

    request: ReservationRequest
    day: str
    month: str
    admitted_at: datetime
    price: PriceVersion
    epoch: int | None = None
    rate: RateState = NO_RATES
    limits: tuple[LimitAtAdmission, ...] = ()
    degraded: bool = False

    @property
    def id(self) -> UUID:
        """The id of the request."""
        return self.request.id

    @property
    def tenant_id(self) -> UUID:
        """The tenant of the request."""
        return self.request.tenant_id


PhaseCauses: TypeAlias = Mapping[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """When what of a request happened, in milliseconds; None where it is unknown.

    `ttft_ms`: until the first token was sent. `phases`: start, from the first of them, and duration by name, which add
    up to `duration_ms`;
    `causes`: what a phase waited for or did, in numbers and names of limits.
    `gap_buckets`: the times between two tokens, counted by `GAP_BOUNDS_MS` of `tenants/ledger/histograms.py`.
    """

    ttft_ms: int | None = None
    duration_ms: int | None = None
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    causes: Mapping[str, PhaseCauses] = field(default_factory=dict)
    gap_buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledUsage:
    """What an ended request used; `prompt_tokens` includes `cached_tokens`, and `completion_tokens` includes `reasoning_tokens`.
    `outcome` None: it was cancelled.

    `amount_pico` follows from the price and is set by admission, as are `limits`, those of the reservation. `refused`: before
    anything ran, so that the request is given back too, not only what it reserved. `system_fingerprint`: of the engine that ran
    it. `unsatisfied`: the answer missed its schema. Fingerprint, `timings` or `limits` None: unknown, as of an end that an earlier
    release wrote. Equal usage may have taken other times and met other limits. Raises `InvalidField`.
    """

    outcome: Outcome | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    amount_pico: int = 0
    refused: bool = field(default=False, compare=False)
    system_fingerprint: str | None = field(default=None, compare=False)
    unsatisfied: bool = field(default=False, compare=False)
    timings: RequestTimings | None = field(default=None, compare=False)
    limits: tuple[LimitAtAdmission, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not (
            0 <= self.cached_tokens <= self.prompt_tokens
            and 0 <= self.reasoning_tokens <= self.completion_tokens
        ):
            raise InvalidField(
                "usage",
                "tokens must not be negative, nor more of them cached than prompted or reasoned than completed",
            )
        _check_amounts(tokens=self.tokens, amount_nano=self.amount_nano)

    @property
    def tokens(self) -> int:
        """Tokens of prompts and completions together."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def amount_nano(self) -> int:
        """The amount as the counters have it, rounded up."""
        return amount_nano(self.amount_pico)

    def cost_pico(self, price: Price) -> int:
        """What it costs."""
        return price.amount_pico(
            self.prompt_tokens, self.cached_tokens, self.completion_tokens, self.reasoning_tokens
        )

    def priced(self, price: Price) -> "SettledUsage":
        """The same usage with what it costs."""
        return replace(self, amount_pico=self.cost_pico(price))


NOTHING_USED: Final = SettledUsage(outcome=None)
REFUSED: Final = SettledUsage(outcome=None, refused=True)
UNKNOWN_TIMINGS: Final = RequestTimings()
