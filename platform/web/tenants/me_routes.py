"""`GET /tenant/v1/me`: the caller's tenant, key and scopes. Any key of a tenant may call it."""

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.responses import ResponseModel, documented
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys import queries as keys
from loraplex.tenants.api_keys.records import KeyDocument
from loraplex.tenants.database import default_limits
from loraplex.tenants.default_limits import UnknownParameters
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository

Anyone = Annotated[TenantRequest, requires(None)]

router = APIRouter()


class TenantDocument(ResponseModel):
    """`default_max_tokens`: the most tokens of a chat answer whose request names no maximum, lowered to what fits; null is what
    the context leaves. `unknown_parameters`: whether a request with such a parameter is refused, or served with a report.
    """

    id: UUID
    name: str
    tier: str
    default_max_tokens: int | None
    unknown_parameters: UnknownParameters


class MeDocument(ResponseModel):
    """`scopes`: those of the key and those that they imply."""

    tenant: TenantDocument
    key: KeyDocument
    scopes: list[str]


@router.get("/me", responses=documented(response=MeDocument))
async def me(request: Anyone) -> Response:
    return await request.read(_me, request.caller)


async def _me(session: AsyncSession, caller: Caller) -> MeDocument:
    key = await keys.key(session, caller.tenant_id, caller.key_id)
    limits, tenant = default_limits(session), await TenantRepository(session).by_id(caller.tenant_id)
    own = (await QuotaRepository(session, caller.tenant_id).tenant()).limits.default_max_tokens
    shown = TenantDocument(
        id=caller.tenant_id,
        name=caller.tenant_name,
        tier=caller.tier,
        default_max_tokens=limits.max_tokens(caller.tier, own),
        unknown_parameters="report" if limits.reports_unknown(tenant.unknown_parameters) else "refuse",
    )
    return MeDocument(tenant=shown, key=key, scopes=sorted(caller.scopes))
