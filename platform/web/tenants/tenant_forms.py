"""What an operator may set for a tenant, as forms. Invariant: bounds that depend on rows or on several fields are the use cases'."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from loraplex.platform.web.console.amounts import Micro, Ppm
from loraplex.platform.web.tenants.billing_routes import Line, Lines
from loraplex.platform.web.tenants.operator_routes import Weight
from loraplex.platform.web.tenants.queries import MAX_TAX_RATE_PPM, MAXIMA

Revision = Annotated[int, Field(ge=1)]


def _limit(name: str) -> Any:
    return Field(default=None, ge=0, le=MAXIMA[name])


class NewTenantForm(BaseModel):
    """A tenant to create."""

    name: str
    tier: str = "standard"
    weight: Weight = 1.0


class TierForm(BaseModel):
    """The tier of a tenant, its share of the engine, and what becomes of requests with unknown parameters."""

    tier: str
    weight: Weight
    unknown_parameters: str
    revision: Revision


class Limits(BaseModel):
    """All limits of a tenant; one that is left empty does not limit."""

    requests_per_minute: int | None = _limit("requests_per_minute")
    tokens_per_minute: int | None = _limit("tokens_per_minute")
    concurrent_requests: int | None = _limit("concurrent_requests")
    tokens_per_day: int | None = _limit("tokens_per_day")
    tokens_per_month: int | None = _limit("tokens_per_month")
    budget_per_day: Micro | None = _limit("budget_per_day")
    budget_per_month: Micro | None = _limit("budget_per_month")
    max_adapters: int | None = _limit("max_adapters")
    max_adapter_bytes: int | None = _limit("max_adapter_bytes")
    max_keys: int | None = _limit("max_keys")
    default_max_tokens: int | None = _limit("default_max_tokens")


class LimitsForm(Limits):
    """The limits of one tenant, and the revision that its author has read."""

    revision: Revision


class BillingForm(BaseModel):
    """What the invoices of a tenant state; a text that is left empty is removed."""

    currency: Annotated[str, Field(pattern="^[A-Z]{3}$")]
    issuer: Lines = None
    customer_name: Line = None
    customer_address: Lines = None
    vat_id: Line = None
    tax_rate_ppm: Annotated[Ppm, Field(ge=0, le=MAX_TAX_RATE_PPM)] = 0
    minimum_micro: Annotated[Micro, Field(ge=0, le=MAXIMA["budget_per_month"])] = 0
    revision: Revision
