"""`/console/limits`: limits and their use, narrower limits of keys and adapters, why a request was limited, and what if.

Invariant: it works while a budget is used up, and while the counters or the engine do not answer.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import RedirectResponse, Response

from loraplex.platform.errors import describe
from loraplex.platform.tenant_limiter import TenantLimiter
from loraplex.platform.web.console.addresses import link, path_of, query_form
from loraplex.platform.web.console.form_routes import MAX_NUMBER, FormSubmission, form_page, submits
from loraplex.platform.web.console.forms import Form, FormInvalid, field_errors, parse
from loraplex.platform.web.console.limit_units import unit_of
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.limits import replay as limit_replay
from loraplex.platform.web.limits.limit_fields import LimitFields, typed
from loraplex.platform.web.usage import queries as usage
from loraplex.tenants.api_keys.use_cases import Member
from loraplex.tenants.errors import NotFound
from loraplex.tenants.quotas import queries as stored_limits
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.quotas.limits import COUNTED, NO_LIMITS, PER_SESSION, QuotaLimits
from loraplex.tenants.scopes import ADAPTERS_WRITE, KEYS_WRITE, USAGE_READ

Reader = Annotated[PageRequest, opens(USAGE_READ)]
KeyManager = Annotated[PageRequest, opens(KEYS_WRITE)]
KeySubmission = Annotated[FormSubmission, submits(KEYS_WRITE)]
AdapterWriter = Annotated[PageRequest, opens(ADAPTERS_WRITE)]
AdapterSubmission = Annotated[FormSubmission, submits(ADAPTERS_WRITE)]
PATH: Final = "/console/limits"
FOLDERS: Final = {"key": "keys", "group": "keys", "adapter": "adapters"}
WRITES: Final = {"key": KEYS_WRITE, "group": KEYS_WRITE, "adapter": ADAPTERS_WRITE}
CHANGED: Final = "The limits are changed. They apply to the next request."
EVENTS: Final = 20
MAX_REQUEST_ID: Final = 200

router = APIRouter()


class LimitForm(LimitFields):
    """The form of a key's or an adapter's limits. `revision`: the one that its author has read."""

    revision: Annotated[int, Field(ge=0, le=MAX_NUMBER)]


async def key_form(page: KeyManager, name: str) -> dict[str, object]:
    """Return what the form of a key's limits shows. Raises `KeyNotFound`."""
    return await _limit_form(page, "key", name)


async def adapter_form(page: AdapterWriter, name: str) -> dict[str, object]:
    """Return what the form of an adapter's limits shows. Raises `AdapterNotFound`."""
    return await _limit_form(page, "adapter", name)


@router.get(PATH)
async def show_limits(page: Reader) -> Response:
    """A `subject` in the address is one that was typed and that nothing has."""
    tenant_id, form = page.tenant_id, query_form(page.http)
    asked = form.text("subject")[:80]
    unknown = (
        {"subject": f"“{asked}” is no adapter, and the name or id of no key or of several."} if asked else {}
    )
    async with page.reading() as session:
        stored = await limits.stored(session, tenant_id)
        crossed = await stored_limits.events(session, tenant_id, None, EVENTS)
        choices = await usage.filter_choices(session, tenant_id)
    counted = await limits.with_use(page.dependencies.admission_controller, tenant_id, stored)
    return page.show(
        "limits/limits.html",
        subjects=counted or stored.subjects,
        is_counted=counted is not None,
        is_cut=len(stored.subjects) >= limits.SUBJECTS,
        crossed=crossed,
        choices=choices,
        form=form.entered(unknown),
        folders=FOLDERS,
        writable={level: scope in page.session.scopes for level, scope in WRITES.items()},
        writes=WRITES,
        currency=page.currency,
    )


@router.get(f"{PATH}/edit")
async def choose_subject(page: Reader) -> Response:
    form = query_form(page.http)
    level, name = await _subject(page, form)
    try:
        await page.query(limits.named, page.tenant_id, level, name)
    except NotFound:
        return RedirectResponse(link(PATH, {"subject": form.text("subject")}), 303)
    return RedirectResponse(path_of("limits", FOLDERS[level], name) if name else PATH, 303)


@router.get(f"{PATH}/explain")
async def explain_refusal(page: Reader) -> Response:
    form = query_form(page.http)
    request_id = form.text("request")[:MAX_REQUEST_ID]
    found, error = None, None
    if request_id:
        try:
            found = await limits.explain(page.dependencies.admission_controller, page.tenant_id, request_id)
        except Exception as failure:
            error = describe(failure)
            if error.row.status not in (404, 503):
                raise
    return page.show(
        "limits/explain.html",
        form=form.entered(),
        found=found,
        error=error,
        asked=request_id,
        unit_of=unit_of,
        currency=page.currency,
    )


@router.get(f"{PATH}/what-if")
async def replay_draft(page: Reader) -> Response:
    """The draft is in the address; without one the form begins with the limits in force."""
    tenant_id, form = page.tenant_id, query_form(page.http)
    replays: TenantLimiter = page.http.app.state.replays
    level, name = await _subject(page, form)
    draft, errors = _draft(form)
    async with page.reading() as session:
        subject = await limits.named(session, tenant_id, level, name)
        choices = await usage.filter_choices(session, tenant_id)
    found, error = None, None
    try:
        if draft is not None:
            async with replays.slot(tenant_id):
                now = datetime.now(UTC)
                found = await page.query(limit_replay.replay, tenant_id, subject.state.subject, draft, now)
    except Exception as failure:
        error = describe(failure)
        if error.row.status not in (409, 429, 503):
            raise
    own = subject.state.limits if draft is None and not errors else NO_LIMITS
    return page.show(
        "limits/what_if.html",
        form=form.entered(errors),
        subject=subject,
        choices=choices,
        values={each: typed(each, own.get(each), page.currency) for each in COUNTED if each != PER_SESSION},
        found=found,
        error=error,
        days=limit_replay.DAYS,
        unit_of=unit_of,
        currency=page.currency,
    )


@form_page(router, f"{PATH}/keys/{{name}}", "limits/edit.html", key_form, fields=COUNTED)
async def limit_key(submission: KeySubmission, name: str) -> Response:
    values = submission.parse(LimitForm)
    values.require_within(await submission.query(limits.bounds, submission.tenant_id), submission.currency)
    authority = Member(submission.tenant_id, submission.session.scopes)
    await submission.run(quotas.narrow_key, authority, name, values.limits, seen=values.revision)
    return submission.back(PATH, CHANGED)


@form_page(router, f"{PATH}/adapters/{{name}}", "limits/edit.html", adapter_form, fields=COUNTED)
async def limit_adapter(submission: AdapterSubmission, name: str) -> Response:
    values = submission.parse(LimitForm)
    values.require_within(await submission.query(limits.bounds, submission.tenant_id), submission.currency)
    await submission.run(
        quotas.narrow_adapter, submission.tenant_id, name, values.limits, seen=values.revision
    )
    return submission.back(PATH, CHANGED)


async def _limit_form(page: PageRequest, level: str, name: str) -> dict[str, object]:
    async with page.reading() as session:
        found = await limits.named(session, page.tenant_id, level, name)
        bounds = await limits.bounds(session, page.tenant_id)
    own = limits.by_name(found.state.limits)
    return {
        "found": found,
        "own": own,
        "bounds": bounds,
        "values": {each: typed(each, value, page.currency) for each, value in own.items()},
        "currency": page.currency,
        "action": path_of("limits", FOLDERS[level], found.state.name),
    }


async def _subject(page: PageRequest, form: Form) -> tuple[str, str]:
    """The level and the name of the subject in an address. A word without a level is an adapter's name, else a key's, but for
    `tenant`; a key stands by its id, or by a name that no other key has.
    """
    text = form.text("subject")
    level, _, name = text.partition(":")
    if text in ("", "tenant"):
        return text, ""
    if level not in FOLDERS:
        is_adapter = await page.query(usage.adapter_existed, page.tenant_id, text)
        level, name = "adapter" if is_adapter else "key", text
    keys = [] if level == "adapter" else await page.query(usage.keys_called, page.tenant_id, name)
    return level, usage.key_id_of(keys[0] if len(keys) == 1 else name)


def _draft(form: Form) -> tuple[QuotaLimits | None, Mapping[str, str]]:
    """The draft in an address, None where it has none or a wrong one; and what is wrong with it, by field."""
    if not any(name in form.fields for name in COUNTED):
        return None, {}
    try:
        fields = parse(form, LimitFields)
        if not any(value is not None for value in fields.amounts.values()):
            return None, {"": "Type at least one limit."}
        with field_errors():
            return fields.limits, {}
    except FormInvalid as invalid:
        return None, invalid.errors
