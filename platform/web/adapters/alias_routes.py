"""Routes of an adapter's aliases: movable names for one version or a weighted split of several."""

from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.adapters.routes import Reader, Writer
from loraplex.platform.web.etags import ABSENT, if_match_or_new
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented, reply_with
from loraplex.platform.web.sorting import SortOrder, by_text
from loraplex.tenants.administration import gated_aliases
from loraplex.tenants.administration.gated_aliases import GateOverride
from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.registry import queries
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.records import MAX_TARGETS, MAX_VERSION, WHOLE, AliasDocument

BY_NAME: Final[SortOrder[AliasDocument, str]] = by_text(lambda alias: alias.alias)
ALIAS: Final = "/adapters/{name}/aliases/{alias}"

router = APIRouter()


class Share(RequestModel):
    version: int = Field(ge=1, le=MAX_VERSION)
    weight: int = Field(ge=1, le=WHOLE)


class Override(RequestModel):
    """Moves an alias although its gate refuses that. It takes `tenant:admin`; `reason` stands in the audit log."""

    reason: str = Field(min_length=1, max_length=500)


class AliasTargets(RequestModel):
    """Exactly one of `version` and `split`. The weights of a split sum to 100. `guard`: when a split of two versions goes back by
    itself. `override`: past the gate.
    """

    version: int | None = Field(default=None, ge=1, le=MAX_VERSION)
    split: list[Share] | None = Field(default=None, min_length=1, max_length=MAX_TARGETS)
    guard: GuardBounds | None = None
    override: Override | None = None


@router.get("/adapters/{name}/aliases", **listed(AliasDocument))
async def list_aliases(request: Reader, name: str) -> Response:
    page = request.page(BY_NAME)
    return await request.listing(page, queries.aliases, request.tenant_id, name, page)


@router.get(ALIAS, responses=documented(response=AliasDocument))
async def get_alias(request: Reader, name: str, alias: str) -> Response:
    return await request.read(queries.alias, request.tenant_id, name, alias)


@router.put(
    ALIAS,
    responses={**documented(409, 412, 428, response=AliasDocument), 201: {"model": AliasDocument}},
    openapi_extra=described(AliasTargets, if_match=True, if_none_match=True),
)
async def put_alias(
    request: Writer, name: str, alias: str, body: Annotated[AliasTargets, request_model(AliasTargets)]
) -> Response:
    """Create the alias (`If-None-Match: *`) or move it (If-Match). Running requests end on the version they began with."""
    seen, targets = if_match_or_new(request.http), targets_of(body)
    status = 201 if seen == ABSENT else 200
    past = body.override
    return await request.replying(lambda moved: reply_with(moved, status)).run(
        gated_aliases.move,
        request.tenant_id,
        name,
        alias,
        targets,
        guard=body.guard,
        seen=seen,
        override=None if past is None else GateOverride(past.reason, request.caller.scopes),
        fingerprint=request.dependencies.engine.info().system_fingerprint,
    )


@router.post(
    f"{ALIAS}/rollback",
    responses=documented(409, 412, 422, response=AliasDocument),
    openapi_extra=described(if_match=True, if_match_required=False, repeatable=True),
)
async def roll_back(request: Writer, name: str, alias: str) -> Response:
    """Move the alias back to its previous targets; two rollbacks in a row change nothing."""
    return await request.run(
        gated_aliases.roll_back,
        request.tenant_id,
        name,
        alias,
        seen=request.if_match_or_any,
        fingerprint=request.dependencies.engine.info().system_fingerprint,
    )


@router.delete(
    ALIAS,
    status_code=204,
    responses=documented(412),
    openapi_extra=described(if_match=True, if_match_required=False),
)
async def delete_alias(request: Writer, name: str, alias: str) -> Response:
    return await request.run(aliases.delete, request.tenant_id, name, alias, seen=request.if_match_or_any)


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
