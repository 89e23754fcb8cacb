"""What a request asks to be admitted with, what it is given, and what it used in the end.

Invariant: an admission carries all that settling it needs; nothing is looked up again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from loraplex.tenants.api_keys.keys import FoundKey
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.quotas.counter_request import Hold
from loraplex.tenants.rate_state import RateState

Outcome = Literal["completed", "aborted", "failed"]
# Told when the counters have let a request in and the books do not have it yet; perhaps more than once.
LetIn: TypeAlias = Callable[[], None]


def not_told() -> None:
    """For whoever begins only what is in the books."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """`id` is a UUIDv7 and used once; `request_id` is what the client knows. Both counts are upper bounds."""

    id: UUID
    request_id: str
    key: FoundKey
    adapter_id: UUID | None = None
    adapter_version: int | None = None
    digest: str | None = None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that may run. `degraded`: by this gateway's share of the limits, without the counters."""

    id: UUID
    tenant_id: UUID
    hold: Hold
    adapter_version: int | None
    digest: str | None
    admitted_at: datetime
    rate: RateState
    degraded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request used; `prompt_tokens` includes `cached_tokens`."""

    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def __post_init__(self) -> None:
        if not (0 <= self.cached_tokens <= self.prompt_tokens and self.completion_tokens >= 0):
            raise InvalidField("usage", "tokens must not be negative, nor more of them cached than prompted")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Times in seconds. A gateway that is silent for `lease_s` is taken for dead and its open requests are given up.

    `valkey_s` is how long an admission waits for Valkey, and 0.8 times that once more for a second attempt; `most_pending`,
    how many settlements may wait for PostgreSQL before nothing more is admitted. Every `compare_s` the counters of
    `compared_at_once` tenants are compared with the books.
    """

    lease_s: float = 45.0
    heartbeat_s: float = 10.0
    gateway_live_s: float = 30.0
    valkey_s: float = 0.05
    probe_s: float = 0.5
    retry_s: float = 1.0
    most_pending: int = 10_000
    compare_s: float = 5.0
    compared_at_once: int = 32
