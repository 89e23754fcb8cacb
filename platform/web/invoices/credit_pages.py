"""Credits: the newest of all tenants, and the form that grants one. Invariant: a credit is never changed or taken back."""

from datetime import UTC, datetime, time, timedelta
from datetime import date as Day
from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field, field_validator
from starlette.responses import Response

from loraplex.platform.web.console.amounts import Micro, between
from loraplex.platform.web.console.form_routes import form_page
from loraplex.platform.web.console.page import AFTER
from loraplex.platform.web.invoices.operator_pages import Operator, Submission
from loraplex.platform.web.invoices.routes import BY_GRANT
from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.records import DEFAULT_PRIORITY, MAX_CREDIT_MICRO, CreditDocument
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/operator/console/credits"
FIELDS: Final = ("tenant", "amount", "currency", "priority", "last_day", "reason")
RENAMED: Final = {"amount_micro": "amount", "expires_at": "last_day"}

router = APIRouter()


class CreditForm(BaseModel):
    """A credit to grant. `last_day`: the last day of which it pays; None: it does not expire."""

    tenant: str
    amount: Annotated[Micro, between(1, MAX_CREDIT_MICRO)]
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None
    priority: int = DEFAULT_PRIORITY
    last_day: Day | None = None
    reason: str

    @field_validator("last_day")
    @classmethod
    def _has_a_next_day(cls, value: Day | None) -> Day | None:
        if value == Day.max:
            raise ValueError("Enter an earlier day, or none.")
        return value

    @property
    def expires_at(self) -> datetime | None:
        """The first moment at which it no longer pays."""
        if self.last_day is None:
            return None
        return datetime.combine(self.last_day, time(), UTC) + timedelta(days=1)

    async def grant(self, uow: UnitOfWork) -> CreditDocument:
        """Raises what `use_cases.grant_credit` raises, and `InvalidField` for a tenant that does not exist."""
        return await use_cases.grant_credit(
            uow,
            await tenant_named(uow.session, self.tenant),
            self.amount,
            self.reason,
            priority=self.priority,
            expires_at=self.expires_at,
            currency=self.currency,
        )


async def newest_credits(page: Operator) -> dict[str, object]:
    """Return the credits below the form. The page's address may name the tenant of a new one."""
    part = page.part(BY_GRANT, parameter=AFTER)
    found = await page.query(queries.credits_of_all, part)
    tenant = page.http.query_params.get("tenant", "")
    return {"credits": page.rows(part, found, parameter=AFTER), "tenant": tenant}


@form_page(router, PATH, "invoices/credits.html", newest_credits, fields=FIELDS, renamed=RENAMED)
async def grant_credit(submission: Submission) -> Response:
    credit = submission.parse(CreditForm)
    await submission.run(credit.grant)
    return submission.back(PATH, f"{credit.tenant} has the credit.")
