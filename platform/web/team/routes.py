"""`/tenant/v1/users`: the people of a tenant, and invitations to it. A person who is no member here is 404."""

from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.services.people import team
from loraplex.platform.services.people.team import TeamEntry
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.platform.web.team.documents import (
    InvitationDocument,
    NewUserBody,
    UserDocument,
    UserPatch,
    invitation_document,
    user_document,
)
from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork

OLDEST_FIRST: Final[SortOrder[TeamEntry, tuple[datetime, UUID]]] = by_time(
    lambda entry: (entry.created_at, entry.id)
)


def users_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    admin = Depends(authenticator.requires(TENANT_ADMIN))
    _add_team(router, endpoint, admin)
    _add_changes(router, endpoint, admin)
    return router


def _add_team(router: APIRouter, endpoint: ManagementEndpoint, admin: Any) -> None:
    @router.get("/users", **listed(UserDocument))
    async def list_users(request: Request, caller: Annotated[Caller, admin]) -> Response:
        """Members and open invitations, oldest first."""
        return await endpoint.listing(
            request,
            caller,
            OLDEST_FIRST,
            lambda session, page: team.members(session, caller.tenant_id, page.after, page.fetch),
            user_document,
        )

    @router.post(
        "/users",
        status_code=201,
        responses=documented(409, 422, response=InvitationDocument, status=201),
        openapi_extra=described(NewUserBody, repeatable=True),
    )
    async def invite_user(
        request: Request,
        caller: Annotated[Caller, admin],
        body: Annotated[NewUserBody, request_model(NewUserBody)],
    ) -> Response:
        """Invite a person: give the link to the person, who signs in by it within 7 days. An open invitation of the same address
        ends. A key that is bound to networks invites no one (403).
        """

        async def work(uow: UnitOfWork) -> ApiResponse:
            invited = await team.invite(
                uow, caller.tenant_id, body.email, body.role, by_key=caller.api_key_id
            )
            return ApiResponse(201, invitation_document(invited), headers={"cache-control": "no-store"})

        return await endpoint.perform(request, caller, work)


def _add_changes(router: APIRouter, endpoint: ManagementEndpoint, admin: Any) -> None:
    changed = documented(409, 412, 428, response=UserDocument)

    @router.patch("/users/{user_id}", responses=changed, openapi_extra=described(UserPatch, if_match=True))
    async def change_user(
        user_id: str,
        request: Request,
        caller: Annotated[Caller, admin],
        body: Annotated[UserPatch, request_model(UserPatch)],
    ) -> Response:
        """Change a member's role. The member's sessions here end; the last admin keeps the role (409). A key that is bound to
        networks gives no roles (403).
        """
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            entry = await team.change_role(
                *(uow, caller.tenant_id, _user_id(user_id), body.role), seen=seen, by_key=caller.api_key_id
            )
            return ApiResponse(200, user_document(entry), etag=entry.revision)

        return await endpoint.perform(request, caller, work)

    @router.delete("/users/{user_id}", status_code=204, responses=documented(409))
    async def remove_user(user_id: str, request: Request, caller: Annotated[Caller, admin]) -> Response:
        """Remove a member, whose sessions here end at once, or withdraw an invitation. The last admin stays (409)."""

        async def work(uow: UnitOfWork) -> ApiResponse:
            await team.remove(uow, caller.tenant_id, _user_id(user_id))
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def _user_id(text: str) -> UUID:
    """Parse an id. Raises `UserNotFound`."""
    parsed = canonical_uuid(text)
    if parsed is None:
        raise UserNotFound("no such member or invitation")
    return parsed
