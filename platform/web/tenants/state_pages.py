"""What stops, starts and ends a tenant, and an operator's look into it: confirmed by a page, and by the typed name for what is final."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.confirmation import Confirmation
from loraplex.platform.web.console.endpoint import redirect
from loraplex.platform.web.console.form_routes import form_page
from loraplex.platform.web.path_ids import TenantId
from loraplex.platform.web.tenants.operator_pages import LIST, ONE, PATH, Operator, Submission
from loraplex.tenants.accounts import queries
from loraplex.tenants.accounts.records import TenantAccountDocument
from loraplex.tenants.administration import tenants as use_cases
from loraplex.tenants.people.sessions import view_as_operator

TENANT_AREA: Final = "/console"
CONFIRM: Final = "tenants/confirm.html"
Question: TypeAlias = Callable[[TenantAccountDocument], Confirmation]
"""What is asked before a step in a tenant's life."""

router = APIRouter()


def suspension(tenant: TenantAccountDocument) -> Confirmation:
    return _confirmation(
        tenant,
        "suspend",
        title=f"Suspend {tenant.name}?",
        consequence="Its next request is refused with 403, on every gateway, and its people are signed out. Adapters, keys"
        " and limits stay; resuming brings everything back.",
        verb="Suspend tenant",
        keep="Keep it active",
        ends_running=True,
    )


def resumption(tenant: TenantAccountDocument) -> Confirmation:
    return _confirmation(
        tenant,
        "resume",
        title=f"Resume {tenant.name}?",
        consequence="Its keys work again from the next request on.",
        verb="Resume tenant",
        keep="Keep it suspended",
    )


def deletion(tenant: TenantAccountDocument) -> Confirmation:
    return _confirmation(
        tenant,
        "delete",
        title=f"Delete {tenant.name}?",
        consequence="Its next request is refused with 401, on every gateway, and those that run end. Its keys, adapters and"
        " people’s access are erased in the background, and cannot be brought back. Usage figures and invoices stay.",
        verb="Delete tenant",
        keep="Keep it",
        path=f"/tenants/{tenant.id}",
        method="DELETE",
        typed=tenant.name,
    )


async def asked(question: Question, page: Operator, tenant_id: TenantId) -> dict[str, object]:
    """Return what the page of a question shows. Raises `TenantNotFound`."""
    return {"asked": question(await page.query(queries.tenant, tenant_id))}


@form_page(router, f"{ONE}/suspend", CONFIRM, partial(asked, suspension))
async def suspend_tenant(submission: Submission, tenant_id: TenantId) -> Response:
    end_running = bool(submission.form.text("end_running"))
    tenant = await submission.result(use_cases.suspend, tenant_id, end_running=end_running)
    return submission.back(f"{PATH}/{tenant_id}", f"{tenant.name} is suspended.")


@form_page(router, f"{ONE}/resume", CONFIRM, partial(asked, resumption))
async def resume_tenant(submission: Submission, tenant_id: TenantId) -> Response:
    tenant = await submission.result(use_cases.resume, tenant_id)
    return submission.back(f"{PATH}/{tenant_id}", f"{tenant.name} is active again.")


@form_page(router, f"{ONE}/delete", CONFIRM, partial(asked, deletion), fields=("typed",))
async def delete_tenant(submission: Submission, tenant_id: TenantId) -> Response:
    tenant = await submission.query(queries.tenant, tenant_id)
    deletion(tenant).require(submission.form)
    await submission.run(use_cases.delete, tenant_id)
    return submission.back(LIST, f"{tenant.name} is deleted; its data is being erased.")


@router.post(f"{ONE}/look")
async def look_as_tenant(submission: Submission, tenant_id: TenantId) -> Response:
    token = await submission.run_own(view_as_operator, submission.session, tenant_id)
    response = redirect(submission.http, TENANT_AREA)
    submission.cookies.start_session(response, "tenant", token)
    return response


def _confirmation(tenant: TenantAccountDocument, step: str, **texts: Any) -> Confirmation:
    address = f"{PATH}/{tenant.id}"
    call = {"path": f"/tenants/{tenant.id}/{step}", **texts}
    return Confirmation(action=f"{address}/{step}", back=address, **call)
