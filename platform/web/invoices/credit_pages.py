"""Credits: the newest of all tenants, and the form that grants one. Invariant: a credit is never changed or taken back."""

from datetime import UTC, datetime, time, timedelta
from datetime import date as Day
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.billing import credits as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.amounts import Micro
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.invoices import queries as billing
from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/operator/console/credits"
PAGE: Final = 50


class CreditForm(BaseModel):
    """A credit to grant. `last_day`: the last day of which it pays; None: it does not expire."""

    tenant: str
    amount: Annotated[Micro, Field(ge=1)]
    currency: Annotated[str | None, Field(pattern="^[A-Z]{3}$")] = None
    priority: int = billing.DEFAULT_PRIORITY
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

    async def grant(self, uow: UnitOfWork) -> None:
        """Raises what `credits.grant` raises, and `InvalidField` for a tenant that does not exist."""
        await use_cases.grant(
            uow,
            await tenant_named(uow.session, self.tenant),
            self.amount,
            self.reason,
            priority=self.priority,
            expires_at=self.expires_at,
            currency=self.currency,
        )


def credits_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of credits."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())

    @router.get(PATH)
    async def show_credits(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        form = Entered({"tenant": request.query_params.get("tenant", "")})
        return await _page(endpoint, request, session, form)

    @router.post(PATH)
    async def grant_credit(
        request: Request,
        session: Annotated[ConsoleSession, operator],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        try:
            credit = parse(form, CreditForm)
            with field_errors():
                await endpoint.perform(request, session, form, credit.grant)
        except FormInvalid as invalid:
            return await _page(endpoint, request, session, form.entered(_named(invalid)), status=422)
        return endpoint.back(request, session, PATH, f"{credit.tenant} has the credit.")

    return router


async def _page(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession, form: Entered, *, status: int = 200
) -> Response:
    after = request.query_params.get("after") if request.method == "GET" else None
    found = await endpoint.query(session, lambda opened: billing.grants(opened, after, PAGE))
    older = None if found.older is None else f"{PATH}?after={found.older}"
    context = {"page": found, "form": form, "older": older, "newest": None if after is None else PATH}
    return endpoint.page(request, session, "invoices/credits.html", status=status, **context)


def _named(invalid: FormInvalid) -> dict[str, str]:
    """The errors by the fields of the form, which have other names than those of the use case."""
    names = {"amount_micro": "amount", "expires_at": "last_day"}
    return {names.get(name, name): message for name, message in invalid.errors.items()}
