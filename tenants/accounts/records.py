"""Tenants as operators see them. Invariant: no record has a key's secret but that of a tenant's creation."""

from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from pydantic import Field

from loraplex.tenants.records import OneTimeSecret, Record, UtcTime

TenantState = Literal["active", "suspended", "deleted"]
MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True)
class TierChange:
    """Changed settings of a tenant; None leaves one as it is."""

    tier: str | None = None
    weight: float | None = None
    unknown_parameters: str | None = None


class TenantAccountDocument(Record):
    """A deleted tenant is found by its id only. `erased_at`: when all of its data except its usage figures was erased."""

    id: UUID
    name: str
    tier: str
    weight: float
    unknown_parameters: str
    created_at: UtcTime
    suspended_at: UtcTime | None
    deleted_at: UtcTime | None
    erased_at: UtcTime | None
    # Sent in the ETag alone, so a stored document has none.
    revision: int = Field(default=0, exclude=True)

    @property
    def state(self) -> TenantState:
        """Whether its keys work."""
        if self.deleted_at is not None:
            return "deleted"
        return "active" if self.suspended_at is None else "suspended"


class NewTenantDocument(TenantAccountDocument, OneTimeSecret):
    """`api_key`: the tenant's first key (scope `tenant:admin`), returned only here."""

    api_key: str = Field(repr=False)
