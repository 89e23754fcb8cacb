"""`GET /tenant/v1/me`: the caller's tenant, key and scopes. Any key of a tenant may call it."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.api.management.endpoint import ManagementEndpoint
from loraplex.platform.api.management.responses import ApiResponse, ResponseModel, documented
from loraplex.platform.api.schemas.keys import KeyDocument, to_response
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import default_limits
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository


class TenantDocument(ResponseModel):
    """`default_max_tokens`: the most tokens of a chat answer whose request names no maximum, lowered to what fits; null is what
    the context leaves.
    """

    id: UUID
    name: str
    tier: str
    default_max_tokens: int | None


class MeDocument(ResponseModel):
    """`scopes`: those of the key and those that they imply."""

    tenant: TenantDocument
    key: KeyDocument
    scopes: list[str]


def me_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    anyone = Depends(authenticator.requires())

    @router.get("/me", responses=documented(response=MeDocument))
    async def me(caller: Annotated[Caller, anyone]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            record = await KeyRepository(session).get(caller.tenant_id, caller.key_id)
            own = (await QuotaRepository(session, caller.tenant_id).tenant()).limits.default_max_tokens
            tenant = TenantDocument(
                id=caller.tenant_id,
                name=caller.tenant_name,
                tier=caller.tier,
                default_max_tokens=default_limits(session).max_tokens(caller.tier, own),
            )
            return ApiResponse(
                200, MeDocument(tenant=tenant, key=to_response(record), scopes=sorted(caller.scopes))
            )

        return await endpoint.read(caller, work)

    return router
