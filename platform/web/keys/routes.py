"""`/tenant/v1/keys`: a tenant's keys, managed with its own keys. A key of another tenant is 404."""

from typing import Annotated, Final, cast

from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from loraplex.platform.web.cursors import flag, flag_parameter
from loraplex.platform.web.keys.queries import KEY_ORDER
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import RequestModel, Time, request_model
from loraplex.platform.web.responses import ApiResponse, documented
from loraplex.tenants.api_keys import queries
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.networks import MAX_NETWORKS
from loraplex.tenants.api_keys.records import MAX_GRACE_SECONDS, KeyChange, KeyDocument, NewKeyDocument
from loraplex.tenants.api_keys.use_cases import Delegated
from loraplex.tenants.names import KEY_NAME_MAX_LENGTH
from loraplex.tenants.scopes import INFERENCE, KEYS_WRITE, TENANT_SCOPES

Manager = Annotated[TenantRequest, requires(KEYS_WRITE)]
Name = Annotated[str, Field(min_length=1, max_length=KEY_NAME_MAX_LENGTH)]
Scope = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(TENANT_SCOPES)})]
Scopes = Annotated[list[Scope], Field(min_length=1, max_length=2 * len(TENANT_SCOPES))]
Networks = Annotated[list[str], Field(max_length=MAX_NETWORKS)]
NEW: Final = documented(409, 422, response=NewKeyDocument, status=201)
END_RUNNING: Final = (
    "Whether the key's running requests end within 2 s, on every gateway, and are billed by what was delivered; "
    "else they run on to their end."
)

router = APIRouter()


class NewKeyBody(RequestModel):
    """`allowed_cidrs`: networks from which the key may be used; an empty list allows all. Without `allowed_cidrs` or
    `expires_at`, the value of the key that creates it applies; neither may exceed that value.
    """

    name: Name
    scopes: Scopes = Field(default_factory=lambda: [INFERENCE])
    expires_at: Time | None = None
    allowed_cidrs: Networks = Field(default_factory=list)

    def bounds(self) -> KeyChange:
        """Return the given restrictions: networks and expiry."""
        return cast("KeyChange", self.model_dump(exclude_unset=True, include={"expires_at", "allowed_cidrs"}))


class KeyPatch(RequestModel):
    """The fields to change; those that are absent stay unchanged."""

    name: Name = Field(default_factory=str)
    scopes: Scopes = Field(default_factory=list)
    expires_at: Time | None = None
    allowed_cidrs: Networks = Field(default_factory=list)

    def change(self) -> KeyChange:
        """Return the given fields."""
        return cast("KeyChange", self.model_dump(exclude_unset=True))


class RotateBody(RequestModel):
    """`grace_seconds`: how long the old key stays valid next to the new one."""

    grace_seconds: int = Field(default=0, ge=0, le=MAX_GRACE_SECONDS)


@router.get("/keys", **listed(KeyDocument))
async def list_keys(request: Manager) -> Response:
    page = request.page(KEY_ORDER)
    return await request.listing(page, queries.keys, request.tenant_id, page)


@router.get("/keys/{key_id}", responses=documented(response=KeyDocument))
async def get_key(request: Manager, key_id: str) -> Response:
    return await request.read(queries.key, request.tenant_id, key_id)


@router.post("/keys", status_code=201, responses=NEW, openapi_extra=described(NewKeyBody, repeatable=True))
async def create_key(request: Manager, body: Annotated[NewKeyBody, request_model(NewKeyBody)]) -> Response:
    return await request.run(api_keys.create, authority_of(request), body.name, body.scopes, body.bounds())


@router.post(
    "/keys/{key_id}/rotate",
    status_code=201,
    responses=NEW,
    openapi_extra=described(RotateBody, optional_body=True, repeatable=True),
)
async def rotate_key(
    request: Manager, key_id: str, body: Annotated[RotateBody, request_model(RotateBody, optional=True)]
) -> Response:
    return await request.run(api_keys.rotate, authority_of(request), key_id, body.grace_seconds)


@router.patch(
    "/keys/{key_id}",
    responses=documented(409, 412, 428, response=KeyDocument),
    openapi_extra=described(KeyPatch, if_match=True),
)
async def change_key(
    request: Manager, key_id: str, body: Annotated[KeyPatch, request_model(KeyPatch)]
) -> Response:
    authority, seen = authority_of(request), request.if_match
    return await request.run(api_keys.change, authority, key_id, body.change(), seen=seen)


@router.delete(
    "/keys/{key_id}",
    status_code=204,
    responses=documented(),
    openapi_extra=flag_parameter("end_running", END_RUNNING),
)
async def revoke_key(request: Manager, key_id: str) -> Response:
    end_running = flag(request.http, "end_running")
    without_body = request.replying(lambda _: ApiResponse(204))
    return await without_body.run(api_keys.revoke, authority_of(request), key_id, end_running=end_running)


def authority_of(request: TenantRequest) -> Delegated:
    """Return the right of the caller's key over the keys of its tenant."""
    return Delegated(request.tenant_id, request.caller.api_key_id)
