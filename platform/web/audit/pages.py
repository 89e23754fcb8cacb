"""The audit log of a tenant and of the installation: `/console/audit`, `/operator/console/audit`. Invariant: it reads only."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.audit.queries import named_target, names_in
from loraplex.platform.web.console.addresses import link, query_form
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest, opens, opens_operator
from loraplex.platform.web.sorting import BY_ID
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.scopes import TENANT_ADMIN

Admin = Annotated[PageRequest, opens(TENANT_ADMIN)]
Operator = Annotated[PageRequest, opens_operator()]
TENANT_PATH: Final = "/console/audit"
OPERATOR_PATH: Final = "/operator/console/audit"
EQUAL: Final = ("actor", "action")
FILTERS: Final = (*EQUAL, "target", "from", "to")
PLACE: Final = "after"
EXPORT_BATCH: Final = 500
MAX_VALUE: Final = 2000
"""Characters of one value that a page shows."""

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """`until` is exclusive. `about`: a target with all that is part of it, such as an adapter with its aliases and versions."""

    equal: Mapping[str, str]
    about: str | None
    since: datetime | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class ChangedField:
    """One field of a change as text; None: it did not exist on this side."""

    name: str
    before: str | None
    after: str | None


@router.get(TENANT_PATH)
async def show_log(page: Admin) -> Response:
    return await _show(page)


@router.get(OPERATOR_PATH)
async def show_whole_log(page: Operator) -> Response:
    return await _show(page)


@router.get(f"{TENANT_PATH}/export")
async def export_log(page: Admin) -> Response:
    return _export(page)


@router.get(f"{OPERATOR_PATH}/export")
async def export_whole_log(page: Operator) -> Response:
    return _export(page)


def changed_fields(entry: OperatorAuditDocument) -> list[ChangedField]:
    """Return the fields of both sides of a change, in the order of their names."""
    before, after = entry.before or {}, entry.after or {}
    return [ChangedField(name, _text(before, name), _text(after, name)) for name in sorted({*before, *after})]


def json_line(entry: OperatorAuditDocument) -> bytes:
    """Write an entry as one line of JSON, with the names of the API."""
    document = entry.model_dump(mode="json")
    document |= {name: document.pop(name) for name in ("before", "after")}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


async def _show(page: PageRequest) -> Response:
    given, path, part = _given(page.http), page.http.url.path, page.part(BY_ID, parameter=PLACE)
    found = await _entries(page, _filter(given), part.after, part.fetch)
    return page.show(
        "audit/audit.html",
        entries=page.rows(part, found, parameter=PLACE),
        names=await page.query(names_in, found),
        named_target=named_target,
        changed_fields=changed_fields,
        form=Entered(given),
        export=link(f"{path}/export", given),
        retention_days=page.dependencies.config.audit_retention_days,
    )


def _export(page: PageRequest) -> Response:
    chosen, now = _filter(_given(page.http)), datetime.now(UTC)
    # Entries of later changes are not part of it, so that it ends.
    lines = _lines(page, replace(chosen, until=chosen.until or now))
    headers = {"content-disposition": f'attachment; filename="audit-{now:%Y-%m-%d}.jsonl"'}
    return StreamingResponse(lines, headers=headers, media_type="application/jsonl")


async def _lines(page: PageRequest, chosen: AuditFilter) -> AsyncIterator[bytes]:
    found = await _entries(page, chosen, None, EXPORT_BATCH)
    yield b"".join(map(json_line, found))
    while len(found) == EXPORT_BATCH:
        found = await _entries(page, chosen, found[-1].id, EXPORT_BATCH)
        yield b"".join(map(json_line, found))


async def _entries(
    page: PageRequest, chosen: AuditFilter, after: UUID | None, limit: int
) -> list[OperatorAuditDocument]:
    tenant_id = page.session.tenant_id
    return await page.query(
        audit_entries,
        tenant_id,
        chosen.equal,
        after,
        limit,
        since=chosen.since,
        until=chosen.until,
        about=chosen.about,
        to_operator=tenant_id is None,
    )


def _given(request: Request) -> dict[str, str]:
    """The filters that are filled in."""
    form = query_form(request)
    return {name: form.text(name) for name in FILTERS if form.text(name)}


def _filter(given: Mapping[str, str]) -> AuditFilter:
    """Read the filters; `to` includes its day. Raises `InvalidParameter`."""
    last = _day(given, "to")
    return AuditFilter(
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


def _text(side: Mapping[str, Any], name: str) -> str | None:
    if name not in side:
        return None
    value = side[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"
