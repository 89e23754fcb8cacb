"""`/console/limits`: limits and their use, narrower limits of keys and adapters, why a request was limited, and what if.

Invariant: it works while a budget is used up, and while the counters or the engine do not answer.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, Literal, cast
from uuid import UUID

from fastapi import APIRouter, Depends
from pydantic import Field
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from loraplex.platform.errors import describe
from loraplex.platform.services import quotas
from loraplex.platform.services.api_keys import Member
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.web.console.addresses import path_of, query_form
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import MAX_NUMBER
from loraplex.platform.web.console.forms import Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.console.legacy_forms import layout_of, tenant_of
from loraplex.platform.web.console.limit_units import unit_of
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.limits import replay as limit_replay
from loraplex.platform.web.limits.limit_fields import LIMIT_NAMES, LimitFields, typed
from loraplex.platform.web.limits.queries import Crossed, EditedLimits, StoredLimits
from loraplex.platform.web.limits.replay import ReplayedDraft, ReplaySubject
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.queries import FilterChoices
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/console/limits"
USAGE_READ: Final = "usage:read"
WRITES: Final = {"keys": "keys:write", "adapters": "adapters:write"}
FOLDERS: Final = {"key": "keys", "group": "keys", "adapter": "adapters"}
MAX_REQUEST_ID: Final = 200
REPLAYS_AT_ONCE: Final = 2
"""In one gateway, one of each tenant: a replay takes a connection, and up to a second of the processor beside all requests."""
REPLAYS_WAITING: Final = 3
Folder = Literal["keys", "adapters"]


class LimitForm(LimitFields):
    """The form of a key's or an adapter's limits. `revision`: the one that its author has read."""

    revision: Annotated[int, Field(ge=0, le=MAX_NUMBER)]


def limits_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the limits pages."""
    router = APIRouter()
    reader = Depends(endpoint.requires(USAGE_READ))

    @router.get(PATH)
    async def show(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        tenant_id = cast("UUID", session.tenant_id)

        async def read(
            transaction: AsyncSession,
        ) -> tuple[StoredLimits, tuple[Crossed, ...], FilterChoices]:
            return (
                await limits.stored(transaction, tenant_id),
                await limits.crossed_budgets(transaction, tenant_id),
                await usage.filter_choices(transaction, tenant_id),
            )

        stored, crossed, choices = await endpoint.query(session, read)
        dependencies = endpoint.dependencies
        counted = await limits.with_use(dependencies.admission_controller, tenant_id, stored)
        return endpoint.page(
            request,
            session,
            "limits/limits.html",
            subjects=counted or stored.subjects,
            is_counted=counted is not None,
            is_cut=len(stored.subjects) >= limits.SUBJECTS,
            crossed=crossed,
            choices=choices,
            folders=FOLDERS,
            writable={level: WRITES[folder] in session.scopes for level, folder in FOLDERS.items()},
            writes={level: WRITES[folder] for level, folder in FOLDERS.items()},
            currency=dependencies.currency_of(tenant_id),
        )

    @router.get(f"{PATH}/edit")
    async def choose(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        level, _, name = query_form(request).text("subject").partition(":")
        if level not in FOLDERS or not name:
            return RedirectResponse(PATH, 303)
        return RedirectResponse(path_of("limits", FOLDERS[level], name), 303)

    @router.get(f"{PATH}/explain")
    async def explain(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        tenant_id, form = cast("UUID", session.tenant_id), query_form(request)
        request_id = form.text("request")[:MAX_REQUEST_ID]
        found, error = None, None
        if request_id:
            try:
                found = await limits.explain(
                    endpoint.dependencies.admission_controller, tenant_id, request_id
                )
            except Exception as failure:
                error = describe(failure)
                if error.row.status not in (404, 503):
                    raise
        return endpoint.page(
            request,
            session,
            "limits/explain.html",
            form=form.entered(),
            found=found,
            error=error,
            asked=request_id,
            currency=endpoint.dependencies.currency_of(tenant_id),
        )

    _add_replay(router, endpoint)
    for folder in ("keys", "adapters"):
        _add_edit(router, endpoint, folder)
    return router


def _add_replay(router: APIRouter, endpoint: ConsoleEndpoint) -> None:
    replays = TenantLimiter("replays", total=REPLAYS_AT_ONCE, per_tenant=1, waiting=REPLAYS_WAITING)

    @router.get(f"{PATH}/what-if")
    async def what_if(
        request: Request, session: Annotated[ConsoleSession, Depends(endpoint.requires(USAGE_READ))]
    ) -> Response:
        """The draft is in the address; without one the form begins with the limits in force."""
        tenant_id, form = cast("UUID", session.tenant_id), query_form(request)
        level, _, name = form.text("subject").partition(":")
        draft, errors = _draft(form)

        async def find(transaction: AsyncSession) -> tuple[ReplaySubject, FilterChoices]:
            subject = await limit_replay.subject(transaction, tenant_id, level, name)
            return subject, await usage.filter_choices(transaction, tenant_id)

        async def replay(
            of: ReplaySubject, limited: limits.Limits, transaction: AsyncSession
        ) -> ReplayedDraft:
            return await limit_replay.replay(transaction, tenant_id, of, limited, datetime.now(UTC))

        subject, choices = await endpoint.query(session, find)
        found, error = None, None
        try:
            if draft is not None:
                async with replays.slot(tenant_id):
                    found = await endpoint.query(session, partial(replay, subject, draft))
        except Exception as failure:
            error = describe(failure)
            if error.row.status not in (409, 429, 503):
                raise
        own = subject.state.limits if draft is None and not errors else limits.Limits()
        return endpoint.page(
            request,
            session,
            "limits/what_if.html",
            status=422 if errors else 200,
            form=form.entered(errors),
            subject=subject,
            choices=choices,
            values={each: typed(each, own.get(each)) for each in LIMIT_NAMES},
            found=found,
            error=error,
            days=limit_replay.DAYS,
            unit_of=unit_of,
            currency=endpoint.dependencies.currency_of(tenant_id),
        )


def _draft(form: Form) -> tuple[limits.Limits | None, Mapping[str, str]]:
    """The draft in an address, None where it has none or a wrong one; and what is wrong with it, by field."""
    if not any(name in form.fields for name in LIMIT_NAMES):
        return None, {}
    try:
        fields = parse(form, LimitFields)
        if not any(value is not None for value in fields.amounts.values()):
            return None, {"": "Type at least one limit."}
        with field_errors():
            return fields.limits, {}
    except FormInvalid as invalid:
        return None, invalid.errors


def _add_edit(router: APIRouter, endpoint: ConsoleEndpoint, folder: Folder) -> None:
    writer = Depends(endpoint.requires(WRITES[folder]))
    path = f"{PATH}/{folder}/{{name}}"

    @router.get(path)
    async def edit(request: Request, name: str, session: Annotated[ConsoleSession, writer]) -> Response:
        return await shown(request, session, name, Form({}, {}), {})

    @router.post(path)
    async def save(
        request: Request,
        name: str,
        session: Annotated[ConsoleSession, writer],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        work = _change_of_key if folder == "keys" else _change_of_adapter
        try:
            fields = parse(form, LimitForm)
            found = await find_limits(session, name)
            fields.require_within(found.bounds, endpoint.dependencies.currency_of(tenant_of(session)))
            with field_errors():
                changes = work(session, name, fields.limits, fields.revision)
                await endpoint.perform(request, session, form, changes)
        except FormInvalid as invalid:
            return await shown(request, session, name, form, invalid.errors)
        return endpoint.back(
            request, session, PATH, "The limits are changed. They apply to the next request."
        )

    async def shown(
        request: Request, session: ConsoleSession, name: str, form: Form, errors: Mapping[str, str]
    ) -> Response:
        found = await find_limits(session, name)
        return endpoint.page(
            request,
            session,
            "limits/edit.html",
            status=422 if errors else 200,
            layout=layout_of(request),
            form=form.entered(errors),
            found=found,
            values={each: typed(each, value) for each, value in found.limits.items()},
            currency=endpoint.dependencies.currency_of(tenant_of(session)),
            action=path_of("limits", folder, name),
        )

    async def find_limits(session: ConsoleSession, name: str) -> EditedLimits:
        find = limits.of_key if folder == "keys" else limits.of_adapter
        return await endpoint.query(session, lambda found: find(found, tenant_of(session), name))


Work = Callable[[UnitOfWork], Awaitable[object]]


def _change_of_key(session: ConsoleSession, name: str, changed: limits.Limits, seen: int) -> Work:
    async def work(uow: UnitOfWork) -> None:
        tenant_id = cast("UUID", session.tenant_id)
        authority = Member(tenant_id, session.scopes)
        await quotas.limit_key(uow, tenant_id, name, changed, authority=authority, seen=seen)

    return work


def _change_of_adapter(session: ConsoleSession, name: str, changed: limits.Limits, seen: int) -> Work:
    async def work(uow: UnitOfWork) -> None:
        await quotas.narrow_adapter(uow, cast("UUID", session.tenant_id), name, changed, seen=seen)

    return work
