"""The limits of a tenant, a key or an adapter. Invariant: every number is small enough for exact arithmetic in doubles, as
Valkey's scripts compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self, get_args
from uuid import UUID

from loraplex.tenants.default_limits import MAX_DEFAULT_TOKENS
from loraplex.tenants.errors import InvalidField

if TYPE_CHECKING:
    from loraplex.tenants.models.quotas import Quota

Level = Literal["tenant", "group", "key", "adapter"]
LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
    "budget_per_day",
    "budget_per_month",
    "tokens_per_session",
]
# The limits that an admission tests, in the order of the scripts; PostgreSQL counts the others.
COUNTED: tuple[LimitName, ...] = get_args(LimitName)
PERIODIC = COUNTED[3:7]
PER_SESSION: LimitName = "tokens_per_session"
RATES: frozenset[LimitName] = frozenset({"requests_per_minute", "tokens_per_minute"})
BUDGETS: frozenset[LimitName] = frozenset({"budget_per_day", "budget_per_month"})
MAX_INTEGER = 2**53 - 1
MAX_RATE = 100_000_000
# In micro-units; counters hold nano-units.
MAX_BUDGET = 9_000_000_000_000
NANO_PER_MICRO = 1000
MAXIMA: Mapping[str, int] = MappingProxyType(
    {
        "requests_per_minute": MAX_RATE,
        "tokens_per_minute": MAX_RATE,
        "concurrent_requests": MAX_RATE,
        "tokens_per_day": MAX_INTEGER,
        "tokens_per_month": MAX_INTEGER,
        "budget_per_day": MAX_BUDGET,
        "budget_per_month": MAX_BUDGET,
        "tokens_per_session": MAX_INTEGER,
        "max_adapters": MAX_INTEGER,
        "max_adapter_bytes": MAX_INTEGER,
        "max_keys": MAX_INTEGER,
        "default_max_tokens": MAX_DEFAULT_TOKENS,
    }
)
TENANT_ONLY = tuple(MAXIMA)[len(COUNTED) :]
"""Limits that only a tenant as a whole has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Limits; None means unlimited, or the installation's default for the last four (`DefaultLimits`).

    Budgets in micro-units of money. `tokens_per_session` bounds each session by itself, and no request without one.
    `default_max_tokens` refuses nothing: it bounds chat answers whose requests name no maximum; 0 is what the context leaves.
    Raises `InvalidField` naming the limit and its range.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    budget_per_day: int | None = None
    budget_per_month: int | None = None
    tokens_per_session: int | None = None
    max_adapters: int | None = None
    max_adapter_bytes: int | None = None
    max_keys: int | None = None
    default_max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            if value is not None and not 0 <= value <= MAXIMA[name]:
                raise InvalidField(name, f"{name} must be between 0 and {MAXIMA[name]}, or null")

    @classmethod
    def of(cls, quota: "Quota | None") -> Self:
        """The limits of a row; without a row, no limits."""
        return cls(**{field.name: getattr(quota, field.name, None) for field in fields(cls)})

    def items(self) -> list[tuple[str, int | None]]:
        return [(name, getattr(self, name)) for name in MAXIMA]

    def get(self, name: str) -> int | None:
        value: int | None = getattr(self, name)
        return value

    def has_periods(self) -> bool:
        """Whether a day or a month is limited; then no request may be admitted without the counters."""
        return any(self.get(name) is not None for name in PERIODIC)


NO_LIMITS = QuotaLimits()


@dataclass(frozen=True, slots=True)
class Subject:
    """A tenant, key or adapter, with its limits. A group is the key at the root of others, which share its limits and its use."""

    level: Level
    id: UUID
    limits: QuotaLimits = NO_LIMITS

    @property
    def counter(self) -> tuple[str, UUID]:
        """What its use is counted in: that of a group is its root's."""
        return "key" if self.level == "group" else self.level, self.id


def wider(limits: QuotaLimits, above: QuotaLimits) -> tuple[str, ...]:
    """The limits that allow more than those of the level above. A missing limit is not wider: the one above still applies."""
    return tuple(
        name
        for name, value in limits.items()
        if value is not None and (ceiling := above.get(name)) is not None and value > ceiling
    )
