"""Routes of an adapter's versions: their state, their validation report check by check, and their profile."""

import re
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.parameters.adapter_profile import profile_schema, read_profile_change
from loraplex.platform.services import versions
from loraplex.platform.web.endpoint import ManagementEndpoint
from loraplex.platform.web.etags import if_match, if_match_or_any
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.request_bodies import body_read_by
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented
from loraplex.platform.web.sorting import SortOrder, by_number
from loraplex.tenants.errors import VersionNotFound
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.records import UtcTime
from loraplex.tenants.registry.adapters import AdapterRepository, ProfileChange
from loraplex.tenants.scopes import ADAPTERS_READ, ADAPTERS_WRITE
from loraplex.tenants.unit_of_work import UnitOfWork

BY_NUMBER: Final[SortOrder[AdapterVersion, int]] = by_number(lambda record: record.version)
_VERSION: Final = re.compile(r"[1-9][0-9]{0,9}")


class CheckDocument(ResponseModel):
    """One check of the validation. `warning`: the check passed, but its detail should be read."""

    model_config = ConfigDict(extra="allow")

    name: str
    passed: bool
    detail: str
    warning: bool = False


class ReportDocument(ResponseModel):
    """The checks in their order, up to the first that failed. `system_fingerprint`: of the engine that probed the version; null
    without a probe.
    """

    checks: list[CheckDocument] = Field(default_factory=list)
    system_fingerprint: str | None = None


class VersionDocument(ResponseModel):
    """`digest`, `rank` and `config` are null until the files were validated. `revision` is the ETag."""

    name: str
    version: int
    digest: str | None
    state: str
    rank: int | None
    size_bytes: int
    config: dict[str, Any] | None
    report: ReportDocument
    tool_style: str | None
    defaults: dict[str, Any]
    created_by: str | None
    created_at: UtcTime
    revision: int


def versions_router(endpoint: ManagementEndpoint, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    reader = Depends(authenticator.requires(ADAPTERS_READ))
    writer = Depends(authenticator.requires(ADAPTERS_WRITE))
    _add_reads(router, endpoint, reader)
    _add_changes(router, endpoint, writer)
    _add_service(router, endpoint, writer)
    return router


def _add_reads(router: APIRouter, endpoint: ManagementEndpoint, reader: Any) -> None:
    @router.get("/adapters/{name}/versions", **listed(VersionDocument))
    async def list_versions(name: str, request: Request, caller: Annotated[Caller, reader]) -> Response:
        """List the versions, newest first."""
        return await endpoint.listing(
            request,
            caller,
            BY_NUMBER,
            lambda session, page: AdapterRepository(session, caller.tenant_id).version_page(
                name, page.after, page.fetch
            ),
            partial(to_response, name),
        )

    @router.get("/adapters/{name}/versions/{version}", responses=documented(response=VersionDocument))
    async def get_version(name: str, version: str, caller: Annotated[Caller, reader]) -> Response:
        async def work(session: AsyncSession) -> ApiResponse:
            record = await AdapterRepository(session, caller.tenant_id).version(name, number_of(version))
            return api_response(name, record)

        return await endpoint.read(caller, work)


def _add_changes(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    @router.patch(
        "/adapters/{name}/versions/{version}",
        responses=documented(409, 412, 428, response=VersionDocument),
        openapi_extra=described(if_match=True) | profile_schema(),
    )
    async def change_version(
        name: str,
        version: str,
        request: Request,
        caller: Annotated[Caller, writer],
        change: Annotated[ProfileChange, body_read_by(read_profile_change)],
    ) -> Response:
        """Change the profile; it is fixed once an alias has pointed to the version."""
        seen = if_match(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            record = await versions.change_profile(
                uow, caller.tenant_id, name, number_of(version), change, seen=seen
            )
            return api_response(name, record)

        return await endpoint.perform(request, caller, work)

    @router.delete(
        "/adapters/{name}/versions/{version}",
        status_code=204,
        responses=documented(409, 412),
        openapi_extra=described(if_match=True, if_match_required=False),
    )
    async def delete_version(
        name: str, version: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        """Delete a version. Refused while an alias points to it, it is being validated, or requests use it."""
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            await versions.delete(uow, caller.tenant_id, name, number_of(version), seen=seen)
            return ApiResponse(204)

        return await endpoint.perform(request, caller, work)


def _add_service(router: APIRouter, endpoint: ManagementEndpoint, writer: Any) -> None:
    described_change = described(if_match=True, if_match_required=False, repeatable=True)
    changed = documented(409, 412, 422, response=VersionDocument)

    @router.post(
        "/adapters/{name}/versions/{version}/deprecate", responses=changed, openapi_extra=described_change
    )
    async def deprecate_version(
        name: str, version: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        """Take a ready version out of service. Refused while an alias points to it."""
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            record = await versions.deprecate(uow, caller.tenant_id, name, number_of(version), seen=seen)
            return api_response(name, record)

        return await endpoint.perform(request, caller, work)

    @router.post(
        "/adapters/{name}/versions/{version}/restore", responses=changed, openapi_extra=described_change
    )
    async def restore_version(
        name: str, version: str, request: Request, caller: Annotated[Caller, writer]
    ) -> Response:
        """Make a deprecated version ready again."""
        seen = if_match_or_any(request)

        async def work(uow: UnitOfWork) -> ApiResponse:
            record = await versions.restore(uow, caller.tenant_id, name, number_of(version), seen=seen)
            return api_response(name, record)

        return await endpoint.perform(request, caller, work)


def number_of(text: str) -> int:
    """Parse a version number. Raises `VersionNotFound` for any other text."""
    if not _VERSION.fullmatch(text):
        raise VersionNotFound(f"no version {text[:20]!r}: versions are numbers from 1")
    return int(text)


def api_response(name: str, record: AdapterVersion) -> ApiResponse:
    return ApiResponse(200, to_response(name, record), record.revision)


def to_response(name: str, record: AdapterVersion) -> VersionDocument:
    return VersionDocument(
        name=name,
        version=record.version,
        digest=record.digest,
        state=record.state,
        rank=record.rank,
        size_bytes=record.size_bytes,
        config=record.config,
        report=ReportDocument.model_validate(record.report),
        tool_style=record.tool_style,
        defaults=record.defaults,
        created_by=record.created_by,
        created_at=record.created_at,
        revision=record.revision,
    )
