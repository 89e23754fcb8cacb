"""Tenants as operators manage them: `/operator/console` and the pages of one tenant.

Invariant: every change is a use case; the first key of a tenant is in the response to its creation and nowhere else.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.addresses import query_form
from loraplex.platform.web.console.amounts import PERCENT_DIGITS, decimal
from loraplex.platform.web.console.form_routes import FormSubmission, form_page, form_post, submits_operator
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import AFTER, PageRequest, opens_operator
from loraplex.platform.web.path_ids import TenantId
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.platform.web.team.pages import invite_person
from loraplex.platform.web.tenants import queries
from loraplex.platform.web.tenants.queries import ActiveTenant, TenantDetail
from loraplex.platform.web.tenants.tenant_forms import (
    AdminForm,
    BillingForm,
    LimitsForm,
    NewTenantForm,
    TierForm,
)
from loraplex.tenants.accounts import queries as accounts
from loraplex.tenants.accounts.records import TierChange
from loraplex.tenants.administration import tenants as use_cases
from loraplex.tenants.billing import use_cases as billing
from loraplex.tenants.invoices import queries as invoices
from loraplex.tenants.quotas import use_cases as quotas

Operator = Annotated[PageRequest, opens_operator()]
Submission = Annotated[FormSubmission, submits_operator()]
LIST: Final = "/operator/console"
PATH: Final = "/operator/console/tenants"
ONE: Final = f"{PATH}/{{tenant_id}}"
BY_NAME: Final[SortOrder[ActiveTenant, str]] = by_text(lambda row: row.tenant.name)

router = APIRouter()


@router.get(LIST)
async def list_tenants(page: Operator) -> Response:
    search, part = query_form(page.http).text("name"), page.part(BY_NAME, parameter=AFTER)
    found = await page.query(queries.tenants, datetime.now(UTC), search, part)
    return page.show(
        "tenants/tenants.html",
        tenants=page.rows(part, found, parameter=AFTER),
        form=Entered({"name": search}),
    )


async def new_form(page: Operator) -> dict[str, object]:
    """Return what the form of a new tenant shows."""
    return {}


# `new` is no id of a tenant.
@form_page(
    router,
    PATH,
    "tenants/new_tenant.html",
    new_form,
    fields=tuple(NewTenantForm.model_fields),
    shown_at=f"{PATH}/new",
)
async def create_tenant(submission: Submission) -> Response:
    values = submission.parse(NewTenantForm)
    created = await submission.result(use_cases.create, values.name, tier=values.tier, weight=values.weight)
    return submission.show("tenants/tenant_created.html", created=created)


@router.get(ONE)
async def show_tenant(page: Operator, tenant_id: TenantId) -> Response:
    return await _show(page, tenant_id, {})


async def _again(name: str, submission: FormSubmission, entered: Entered, tenant_id: UUID) -> Response:
    return await _show(submission, tenant_id, {name: entered}, status=422)


@form_post(router, f"{ONE}/tier", partial(_again, "tier"))
async def change_tier(submission: Submission, tenant_id: TenantId) -> Response:
    values = submission.parse(TierForm)
    change = TierChange(values.tier, values.weight, values.unknown_parameters)
    await submission.run(use_cases.change_tier, tenant_id, change, seen=values.revision)
    return submission.back(f"{PATH}/{tenant_id}", "Tier and weight apply to the next request.")


@form_post(router, f"{ONE}/limits", partial(_again, "limits"))
async def change_limits(submission: Submission, tenant_id: TenantId) -> Response:
    values = submission.parse(LimitsForm)
    limits = values.model_dump(exclude={"revision"})
    await submission.run(quotas.change, tenant_id, limits, seen=values.revision)
    return submission.back(f"{PATH}/{tenant_id}", "The limits apply to the next request, on every gateway.")


@form_post(router, f"{ONE}/billing", partial(_again, "billing"))
async def change_billing(submission: Submission, tenant_id: TenantId) -> Response:
    values = submission.parse(BillingForm)
    fields = values.model_dump(exclude={"revision"})
    await submission.run(billing.change_billing, tenant_id, fields, seen=values.revision)
    return submission.back(f"{PATH}/{tenant_id}", "The next invoice states this.")


@form_post(router, f"{ONE}/people", partial(_again, "people"))
async def invite(submission: Submission, tenant_id: TenantId) -> Response:
    """Invite an admin, who invites the others."""
    values = submission.parse(AdminForm)
    tenant = await submission.query(accounts.tenant, tenant_id)
    return await invite_person(submission, tenant_id, tenant.name, values, f"{PATH}/{tenant_id}")


async def _show(
    page: PageRequest, tenant_id: UUID, refused: Mapping[str, Entered], *, status: int = 200
) -> Response:
    """Show a tenant. `refused`: what was typed into a form, by the last part of its address."""
    now = datetime.now(UTC)
    async with page.reading() as session:
        detail = await queries.tenant(session, tenant_id, now)
        credits = await invoices.ranked_credits(session, tenant_id, now)
    return page.show(
        "tenants/tenant.html",
        status=status,
        tenant=detail.tenant,
        detail=detail,
        credits=credits,
        address=f"{PATH}/{tenant_id}",
        forms={**_stored(detail), **refused},
    )


def _stored(detail: TenantDetail) -> dict[str, Entered]:
    """Return the forms of a tenant's page with what is set now."""
    limits = {
        name: decimal(value) if name.startswith("budget") else "" if value is None else str(value)
        for name, value in detail.quotas.limits.items()
    }
    data, tenant = detail.billing, detail.tenant
    billed = {
        "issuer": data.issuer or "",
        "customer_name": data.customer_name or "",
        "customer_address": data.customer_address or "",
        "vat_id": data.vat_id or "",
        "currency": data.next_currency or data.currency,
        "tax_rate_ppm": decimal(data.tax_rate_ppm, PERCENT_DIGITS),
        "minimum_micro": decimal(data.minimum_micro),
        "revision": str(data.revision),
    }
    tier = {
        "tier": tenant.tier,
        "weight": f"{tenant.weight:g}",
        "unknown_parameters": tenant.unknown_parameters,
        "revision": str(tenant.revision),
    }
    return {
        "tier": Entered(tier),
        "limits": Entered({**limits, "revision": str(detail.quotas.revision)}),
        "billing": Entered(billed),
    }
