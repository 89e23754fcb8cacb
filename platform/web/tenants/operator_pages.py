"""Tenants as operators manage them: `/operator/console` and the pages of one tenant.

Invariant: every change is a use case; the first key of a tenant is in the response to its creation and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services import tenants as use_cases
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.addresses import query_form
from loraplex.platform.web.console.amounts import PERCENT_DIGITS, decimal
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.tenants import queries as tenants
from loraplex.platform.web.tenants.tenant_forms import (
    BillingForm,
    LimitsForm,
    NewTenantForm,
    TierForm,
)
from loraplex.tenants.invoices import queries as invoices
from loraplex.tenants.invoices.records import RankedCredit
from loraplex.tenants.unit_of_work import UnitOfWork

LIST: Final = "/operator/console"
PATH: Final = "/operator/console/tenants"
PAGE: Final = 50
SentForm: TypeAlias = Annotated[Form, Depends(read_form)]
CHANGES: Final[Mapping[str, tuple[type[TierForm | LimitsForm | BillingForm], str]]] = {
    "tier": (TierForm, "Tier and weight apply to the next request."),
    "limits": (LimitsForm, "The limits apply to the next request, on every gateway."),
    "billing": (BillingForm, "The next invoice states this."),
}
"""The forms on a tenant's page, by the last part of their addresses, and the fact after each."""


@dataclass(frozen=True, slots=True)
class NewTenant:
    """A tenant that was created, and its first key."""

    id: UUID
    name: str
    api_key: str


def tenants_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the list, of creation, and of a tenant's page with its forms."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())
    _add_list(router, endpoint, operator)
    _add_creation(router, endpoint, operator)
    _add_tenant(router, endpoint, operator)
    return router


def _add_list(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    @router.get(LIST)
    async def list_tenants(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        asked = query_form(request)
        search, after = asked.text("name"), asked.text("after") or None
        now = datetime.now(UTC)
        page = await endpoint.query(session, lambda found: tenants.tenants(found, now, search, after, PAGE))
        kept = {"name": search} if search else {}
        following = page.following and f"{LIST}?{urlencode({**kept, 'after': page.following})}"
        return endpoint.page(
            request,
            session,
            "tenants/tenants.html",
            page=page,
            form=Entered({"name": search}),
            following=following,
            first=None if after is None else f"{LIST}?{urlencode(kept)}",
        )


def _add_creation(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    @router.get(f"{PATH}/new")
    async def new_tenant(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        return endpoint.page(request, session, "tenants/new_tenant.html", form=None)

    @router.post(PATH)
    async def create_tenant(
        request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        async def create(uow: UnitOfWork) -> NewTenant:
            created = await use_cases.create(uow, values.name, tier=values.tier, weight=values.weight)
            return NewTenant(created.tenant.id, created.tenant.name, created.key.plaintext)

        try:
            values = parse(form, NewTenantForm)
            with field_errors():
                created = await endpoint.perform(request, session, form, create, NewTenant)
        except FormInvalid as invalid:
            entered = form.entered(invalid.errors)
            return endpoint.page(request, session, "tenants/new_tenant.html", status=422, form=entered)
        return endpoint.page(request, session, "tenants/tenant_created.html", created=created)


def _add_tenant(router: APIRouter, endpoint: ConsoleEndpoint, operator: object) -> None:
    @router.get(f"{PATH}/{{tenant_id}}")
    async def show_tenant(
        tenant_id: str, request: Request, session: Annotated[ConsoleSession, operator]
    ) -> Response:
        return await tenant_page(endpoint, request, session, tenants.tenant_id_of(tenant_id), {})

    for name in CHANGES:
        _add_change(router, endpoint, operator, name)


def _add_change(router: APIRouter, endpoint: ConsoleEndpoint, operator: object, name: str) -> None:
    model, fact = CHANGES[name]

    @router.post(f"{PATH}/{{tenant_id}}/{name}", name=f"change_{name}")
    async def change(
        tenant_id: str, request: Request, session: Annotated[ConsoleSession, operator], form: SentForm
    ) -> Response:
        identity = tenants.tenant_id_of(tenant_id)
        try:
            values = parse(form, model)
            with field_errors():
                await endpoint.perform(request, session, form, lambda uow: values.change(uow, identity))
        except FormInvalid as invalid:
            forms = {name: form.entered(invalid.errors)}
            return await tenant_page(endpoint, request, session, identity, forms, status=422)
        return endpoint.back(request, session, f"{PATH}/{identity}", fact)


async def tenant_page(
    endpoint: ConsoleEndpoint,
    request: Request,
    session: ConsoleSession,
    tenant_id: UUID,
    forms: Mapping[str, Entered],
    *,
    status: int = 200,
) -> Response:
    """Show a tenant. `forms`: what was typed into forms that were refused, by their names in `CHANGES`."""

    async def find(found: AsyncSession) -> tuple[tenants.TenantDetail, list[RankedCredit]]:
        now = datetime.now(UTC)
        return await tenants.tenant(found, tenant_id, now), await invoices.ranked_credits(
            found, tenant_id, now
        )

    detail, credits = await endpoint.query(session, find)
    return endpoint.page(
        request,
        session,
        "tenants/tenant.html",
        status=status,
        tenant=detail.row,
        detail=detail,
        credits=credits,
        address=f"{PATH}/{tenant_id}",
        forms={**_stored(detail), **forms},
    )


def _stored(detail: tenants.TenantDetail) -> dict[str, Entered]:
    """Return the forms of a tenant's page with what is set now."""
    limits = {
        name: decimal(value) if name.startswith("budget") else "" if value is None else str(value)
        for name, value in detail.limits.items()
    }
    data = detail.billing
    texts = {
        name: getattr(data, name) or "" for name in ("issuer", "customer_name", "customer_address", "vat_id")
    }
    billed = {
        **texts,
        "currency": data.next_currency or data.currency,
        "tax_rate_ppm": decimal(data.tax_rate_ppm, PERCENT_DIGITS),
        "minimum_micro": decimal(data.minimum_micro),
    }
    row = detail.row
    return {
        "tier": Entered(
            {
                "tier": row.tier,
                "weight": f"{row.weight:g}",
                "unknown_parameters": row.unknown_parameters,
                "revision": str(row.revision),
            }
        ),
        "limits": Entered({**limits, "revision": str(detail.limits_revision)}),
        "billing": Entered({**billed, "revision": str(detail.billing_revision)}),
    }
