"""The audit log of a tenant and of the installation: `/console/audit`, `/operator/console/audit`. Invariant: it reads only."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.audit import queries as audit
from loraplex.platform.web.console.addresses import query_form
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered

TENANT_PATH: Final = "/console/audit"
OPERATOR_PATH: Final = "/operator/console/audit"
EQUAL: Final = ("actor", "action")
FILTERS: Final = (*EQUAL, "target", "from", "to")
PAGE: Final = 50
EXPORT_BATCH: Final = 500


def audit_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of both audit logs."""
    router = APIRouter()
    _add_log(router, endpoint, TENANT_PATH, Depends(endpoint.requires("tenant:admin")))
    _add_log(router, endpoint, OPERATOR_PATH, Depends(endpoint.requires_operator()))
    return router


def _add_log(router: APIRouter, endpoint: ConsoleEndpoint, path: str, reader: object) -> None:
    @router.get(path)
    async def show_log(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        given = _given(request)
        chosen, after = _filter(given, session.tenant_id), request.query_params.get("after")
        page = await endpoint.query(session, lambda found: audit.entries(found, chosen, after, PAGE))
        older = None if page.older is None else f"{path}?{urlencode({**given, 'after': page.older})}"
        query = f"?{urlencode(given)}" if given else ""
        return endpoint.page(
            request,
            session,
            "audit/audit.html",
            page=page,
            form=Entered(given),
            older=older,
            newest=None if after is None else path + query,
            export=f"{path}/export{query}",
            retention_days=endpoint.dependencies.config.audit_retention_days,
        )

    @router.get(f"{path}/export")
    async def export_log(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        chosen = _filter(_given(request), session.tenant_id)
        # Entries of later changes are not part of it, so that it ends.
        chosen = replace(chosen, until=chosen.until or datetime.now(UTC))
        headers = {"content-disposition": f'attachment; filename="audit-{datetime.now(UTC):%Y-%m-%d}.jsonl"'}
        lines = _lines(endpoint, session, chosen)
        return StreamingResponse(lines, headers=headers, media_type="application/jsonl")


async def _lines(
    endpoint: ConsoleEndpoint, session: ConsoleSession, chosen: audit.AuditFilter
) -> AsyncIterator[bytes]:
    after: str | None = None

    async def read(found: AsyncSession) -> audit.AuditPage:
        return await audit.entries(found, chosen, after, EXPORT_BATCH)

    while True:
        page = await endpoint.query(session, read)
        yield b"".join(map(audit.json_line, page.rows))
        if page.older is None:
            return
        after = str(page.older)


def _given(request: Request) -> dict[str, str]:
    """The filters that are filled in."""
    form = query_form(request)
    return {name: form.text(name) for name in FILTERS if form.text(name)}


def _filter(given: Mapping[str, str], tenant_id: UUID | None) -> audit.AuditFilter:
    """Read the filters; `to` includes its day. Raises `InvalidParameter`."""
    last = _day(given, "to")
    return audit.AuditFilter(
        tenant_id=tenant_id,
        equal={name: given[name] for name in EQUAL if name in given},
        about=given.get("target"),
        since=_day(given, "from"),
        until=None if last is None else last + timedelta(days=1),
    )


def _day(given: Mapping[str, str], name: str) -> datetime | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise InvalidParameter(f"“{text[:20]}” is no day, such as 2026-11-20.", param=name) from None
    if not 2000 <= day.year < 2100:
        raise InvalidParameter(f"“{text[:20]}” is not between 2000 and 2099.", param=name)
    return datetime.combine(day, time(), UTC)
