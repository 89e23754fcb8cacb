"""`/operator/v1/tenants`: create, list, suspend, resume and delete tenants, invite their people, and set their tier and share of the
engine.

Invariant: a change applies to the tenant's next request on every gateway. A deletion stops the tenant at once; its data is
erased in the background.
"""

from typing import Annotated, Final, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import TenantId
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.platform.web.team.routes import Email, invited_once
from loraplex.tenants.accounts import queries
from loraplex.tenants.accounts.records import MAX_WEIGHT, NewTenantDocument, TenantAccountDocument, TierChange
from loraplex.tenants.administration import tenants as use_cases
from loraplex.tenants.names import TENANT_NAME
from loraplex.tenants.people import team
from loraplex.tenants.people.records import InvitationDocument, Role

Operator = Annotated[OperatorRequest, requires_operator()]
BY_NAME: Final[SortOrder[TenantAccountDocument, str]] = by_text(lambda tenant: tenant.name)
Name = Annotated[str, Field(pattern=TENANT_NAME)]
Weight = Annotated[float, Field(gt=0, le=MAX_WEIGHT)]

router = APIRouter(prefix="/tenants")


class NewTenant(RequestModel):
    name: Name
    tier: Name = "standard"
    weight: Weight = 1.0


class Tier(RequestModel):
    """Fields that are absent stay unchanged. `unknown_parameters`: `default` is what the installation sets."""

    tier: Name | None = None
    weight: Weight | None = None
    unknown_parameters: Literal["default", "refuse", "report"] | None = None


class Invited(RequestModel):
    """The person to invite. `role`: what the person may do in the tenant."""

    email: Email
    role: Role = "admin"


class Nothing(RequestModel):
    """A body without fields."""


class Suspend(RequestModel):
    """`end_running`: the tenant's running requests end within 2 s, on every gateway, and are billed by what was delivered; else
    they run on to their end.
    """

    end_running: bool = True


@router.get("", **listed(TenantAccountDocument))
async def list_tenants(request: Operator) -> Response:
    page = request.page(BY_NAME)
    return await request.listing(page, queries.tenants, page)


@router.get("/{tenant_id}", responses=documented(response=TenantAccountDocument))
async def get_tenant(request: Operator, tenant_id: TenantId) -> Response:
    return await request.read(queries.tenant, tenant_id)


@router.post(
    "",
    status_code=201,
    responses=documented(409, 422, response=NewTenantDocument, status=201),
    openapi_extra=described(NewTenant, repeatable=True),
)
async def create_tenant(request: Operator, body: Annotated[NewTenant, request_model(NewTenant)]) -> Response:
    return await request.run(use_cases.create, body.name, tier=body.tier, weight=body.weight)


@router.post(
    "/{tenant_id}/users",
    status_code=201,
    responses=documented(409, 422, response=InvitationDocument, status=201),
    openapi_extra=described(Invited, repeatable=True),
)
async def invite_user(
    request: Operator, tenant_id: TenantId, body: Annotated[Invited, request_model(Invited)]
) -> Response:
    """Invite a person to the tenant, such as its first admin: give the link to the person, who signs in by it within 7 days."""
    return await request.replying(invited_once).run(team.invite, tenant_id, body.email, body.role)


@router.post(
    "/{tenant_id}/suspend",
    responses=documented(409, 422, response=TenantAccountDocument),
    openapi_extra=described(Suspend, optional_body=True, repeatable=True),
)
async def suspend_tenant(
    request: Operator, tenant_id: TenantId, body: Annotated[Suspend, request_model(Suspend, optional=True)]
) -> Response:
    return await request.run(use_cases.suspend, tenant_id, end_running=body.end_running)


@router.post(
    "/{tenant_id}/resume",
    responses=documented(409, 422, response=TenantAccountDocument),
    openapi_extra=described(Nothing, optional_body=True, repeatable=True),
)
async def resume_tenant(
    request: Operator, tenant_id: TenantId, body: Annotated[Nothing, request_model(Nothing, optional=True)]
) -> Response:
    return await request.run(use_cases.resume, tenant_id)


@router.delete(
    "/{tenant_id}", status_code=202, responses=documented(response=TenantAccountDocument, status=202)
)
async def delete_tenant(request: Operator, tenant_id: TenantId) -> Response:
    return await request.run(use_cases.delete, tenant_id)


@router.patch(
    "/{tenant_id}/tier",
    responses=documented(412, 428, response=TenantAccountDocument),
    openapi_extra=described(Tier, if_match=True),
)
async def change_tier(
    request: Operator, tenant_id: TenantId, body: Annotated[Tier, request_model(Tier)]
) -> Response:
    seen = request.if_match
    for name in body.model_fields_set:
        if getattr(body, name) is None:
            raise InvalidParameter(f"`{name}` must not be null.", param=name)
    change = TierChange(body.tier, body.weight, body.unknown_parameters)
    return await request.run(use_cases.change_tier, tenant_id, change, seen=seen)
