"""Routes of an adapter's aliases: movable names for one version or a weighted split of several."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services import aliases
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import ABSENT, if_match_or_any, if_match_or_new
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.records import UtcTime
from loraplex.tenants.registry.adapters import MAX_VERSION
from loraplex.tenants.registry.aliases import MAX_TARGETS, WHOLE, AliasRepository, AliasState
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE
from loraplex.tenants.unit_of_work import UnitOfWork

BY_NAME: Final[SortOrder[AliasState, str]] = by_text(lambda state: state.alias)


class Share(RequestModel):
    version: int = Field(ge=1, le=MAX_VERSION)
    weight: int = Field(ge=1, le=WHOLE)


class AliasTargets(RequestModel):
    """Exactly one of `version` and `split`. The weights of a split sum to 100."""

    version: int | None = Field(default=None, ge=1, le=MAX_VERSION)
    split: list[Share] | None = Field(default=None, min_length=1, max_length=MAX_TARGETS)


class ShareDocument(ResponseModel):
    version: int
    weight: int


class AliasDocument(ResponseModel):
    """`version`: the version of all requests, null for a split. `previous`: the target of a rollback. `revision`: the ETag."""

    name: str
    alias: str
    version: int | None
    split: list[ShareDocument]
    previous: list[ShareDocument] | None
    updated_at: UtcTime
    revision: int


def aliases_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(ADAPTERS_READ))
    writer = Depends(authenticator.requires(ADAPTERS_WRITE))
    _add_reads(router, endpoint, reader)
    _add_moving(router, endpoint, writer)
    _add_deletion(router, endpoint, writer)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, reader: Any) -> None:
    @router.get("/adapters/{name}/aliases", **listed(AliasDocument))
    async def list_aliases(name: str, request: Request, caller: Annotated[Caller, reader]) -> Response:
        return await endpoint.listing(
            request,
            caller,
            BY_NAME,
            lambda session, page: AliasRepository(session, caller.tenant_id).page(
                name, page.after, page.fetch
            ),
            partial(to_response, name),
        )

    @router.get("/adapters/{name}/aliases/{alias}", responses=documented(response=AliasDocument))
    async def get_alias(name: str, alias: str, caller: Annotated[Caller, reader]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            return api_response(name, await AliasRepository(session, caller.tenant_id).get(name, alias))

        return await endpoint.read(caller, work)


def _add_moving(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.put(
        "/adapters/{name}/aliases/{alias}",
        responses={**documented(409, 412, 428, response=AliasDocument), 201: {"model": AliasDocument}},
        openapi_extra=described(AliasTargets, if_match=True, if_none_match=True),
    )
    async def put_alias(
        name: str,
        alias: str,
        request: Request,
        caller: Annotated[Caller, writer],
        body: Annotated[AliasTargets, request_model(AliasTargets)],
    ) -> Response:
        """Create the alias (`If-None-Match: *`) or move it (If-Match). Running requests end on the version they began with."""
        seen, targets = if_match_or_new(request), targets_of(body)

        async def work(uow: UnitOfWork) -> ApiResponse:
            state = await aliases.move(uow, caller.tenant_id, name, alias, targets, seen=seen)
            return api_response(name, state, 201 if seen == ABSENT else 200)

        return await endpoint.perform(request, caller, work)

    @router.post(
        "/adapters/{name}/aliases/{alias}/rollback",
        responses=documented(409, 412, 422, response=AliasDocument),
        openapi_extra=described(if_match=True, if_match_required=False, repeatable=True),
    )
    async def roll_back(
        name: str, alias: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        """Move the alias back to its previous targets; two rollbacks in a row change nothing."""
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            return api_response(name, await aliases.roll_back(uow, caller.tenant_id, name, alias, seen=seen))

        return await endpoint.perform(request, caller, work)


def _add_deletion(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.delete(
        "/adapters/{name}/aliases/{alias}",
        status_code=204,
        responses=documented(412),
        openapi_extra=described(if_match=True, if_match_required=False),
    )
    async def delete_alias(
        name: str, alias: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            await aliases.delete(uow, caller.tenant_id, name, alias, seen=seen)
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def targets_of(body: AliasTargets) -> dict[int, int]:
    """Return version -> weight. Raises `InvalidParameter` unless the body has exactly one of the two fields."""
    if (body.version is None) == (body.split is None):
        raise InvalidParameter("Exactly one of `version` and `split` is needed.", param="version")
    if body.version is not None:
        return {body.version: WHOLE}
    shares = body.split or []
    targets = {share.version: share.weight for share in shares}
    if len(targets) != len(shares):
        raise InvalidParameter("`split` names a version twice.", param="split")
    return targets


def api_response(name: str, state: AliasState, status: int = 200) -> ApiResponse:
    return ApiResponse(status, to_response(name, state), state.generation)


def to_response(name: str, state: AliasState) -> AliasDocument:
    return AliasDocument(
        name=name,
        alias=state.alias,
        version=state.version if len(state.targets) == 1 else None,
        split=shares(state.targets),
        previous=None if state.previous is None else shares(state.previous),
        updated_at=state.updated_at,
        revision=state.generation,
    )


def shares(targets: Mapping[int, int]) -> list[ShareDocument]:
    return [ShareDocument(version=version, weight=targets[version]) for version in sorted(targets)]
