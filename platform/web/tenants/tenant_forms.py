"""What an operator may set for a tenant, as forms. Invariant: bounds that depend on rows or on several fields are the use cases'."""

from typing import Annotated

from pydantic import BaseModel, Field

from loraplex.platform.web.console.amounts import Ppm
from loraplex.platform.web.limits.documents import limit_annotations
from loraplex.platform.web.limits.limit_fields import Budget
from loraplex.platform.web.team.pages import InvitationForm
from loraplex.platform.web.tenants.billing_routes import Line, Lines
from loraplex.platform.web.tenants.operator_routes import Weight
from loraplex.tenants.billing.records import MAX_TAX_RATE_PPM
from loraplex.tenants.quotas.limits import MAXIMA

Revision = Annotated[int, Field(ge=1)]


class NewTenantForm(BaseModel):
    """A tenant to create."""

    name: str
    tier: str = "standard"
    weight: Weight = 1.0


class AdminForm(InvitationForm):
    """Who is invited as an admin."""

    role: str = "admin"


class TierForm(BaseModel):
    """The tier of a tenant, its share of the engine, and what becomes of requests with unknown parameters."""

    tier: str
    weight: Weight
    unknown_parameters: str
    revision: Revision


class Limits(BaseModel):
    """All limits of a tenant; one that is left empty does not limit."""

    # One field for each limit: names and maxima stand in `tenants/quotas/limits.py` alone.
    __annotations__ = limit_annotations(MAXIMA, money=Budget)


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
    minimum_micro: Budget = 0
    revision: Revision
