"""The fields of bodies that set limits, with their bounds: an operator's for a tenant, a tenant's for its keys and adapters."""

from typing import Annotated

from pydantic import Field

from loraplex.platform.api.management.request_bodies import Body
from loraplex.tenants.quotas.limits import MAX_BUDGET, MAX_INTEGER, MAX_RATE

Rate = Annotated[int | None, Field(ge=0, le=MAX_RATE)]
Count = Annotated[int | None, Field(ge=0, le=MAX_INTEGER)]
Budget = Annotated[int | None, Field(ge=0, le=MAX_BUDGET)]


class CountedLimits(Body):
    """What requests are counted against; null is no limit."""

    requests_per_minute: Rate = None
    tokens_per_minute: Rate = None
    concurrent_requests: Rate = None
    tokens_per_day: Count = None
    tokens_per_month: Count = None
    budget_per_day: Budget = None
    budget_per_month: Budget = None
