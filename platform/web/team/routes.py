"""`/tenant/v1/users`: the people of a tenant, and invitations to it. A person who is no member here is 404."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import PathId
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.sorting import BY_CREATION
from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.names import EMAIL_MAX_LENGTH
from loraplex.tenants.people import team
from loraplex.tenants.people.records import InvitationDocument, Role, UserDocument
from loraplex.tenants.scopes import TENANT_ADMIN

Admin = Annotated[TenantRequest, requires(TENANT_ADMIN)]
UserId = Annotated[UUID, PathId(UserNotFound, "no such member or invitation")]
Email = Annotated[str, Field(min_length=3, max_length=EMAIL_MAX_LENGTH)]

router = APIRouter()


class NewUserBody(RequestModel):
    """The person to invite. `role`: what the person may do here."""

    email: Email
    role: Role


class UserPatch(RequestModel):
    """`role`: what the member may do from now on."""

    role: Role


@router.get("/users", **listed(UserDocument))
async def list_users(request: Admin) -> Response:
    """Members and open invitations, oldest first."""
    page = request.page(BY_CREATION)
    return await request.listing(page, team.members, request.tenant_id, page)


@router.post(
    "/users",
    status_code=201,
    responses=documented(409, 422, response=InvitationDocument, status=201),
    openapi_extra=described(NewUserBody, repeatable=True),
)
async def invite_user(request: Admin, body: Annotated[NewUserBody, request_model(NewUserBody)]) -> Response:
    """Invite a person: give the link to the person, who signs in by it within 7 days. An open invitation of the same address
    ends. A key that is bound to networks invites no one (403).
    """
    return await request.replying(invited_once).run(
        team.invite, request.tenant_id, body.email, body.role, by_key=request.caller.api_key_id
    )


@router.patch(
    "/users/{user_id}",
    responses=documented(409, 412, 428, response=UserDocument),
    openapi_extra=described(UserPatch, if_match=True),
)
async def change_user(
    request: Admin, user_id: UserId, body: Annotated[UserPatch, request_model(UserPatch)]
) -> Response:
    """Change a member's role. The member's sessions here end; the last admin keeps the role (409). A key that is bound to
    networks gives no roles (403).
    """
    return await request.run(
        team.change_role,
        request.tenant_id,
        user_id,
        body.role,
        seen=request.if_match,
        by_key=request.caller.api_key_id,
    )


@router.delete("/users/{user_id}", status_code=204, responses=documented(409))
async def remove_user(request: Admin, user_id: UserId) -> Response:
    """Remove a member, whose sessions here end at once, or withdraw an invitation. The last admin stays (409)."""
    return await request.run(team.remove, request.tenant_id, user_id)


def invited_once(invited: InvitationDocument) -> ApiResponse:
    """Return the response with the link of an invitation, which no cache keeps."""
    return ApiResponse(201, invited, headers={"cache-control": "no-store"})
