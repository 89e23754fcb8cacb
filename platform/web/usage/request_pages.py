"""`/console/requests`: the request log, and one request with where its time went. No content of messages is stored or shown."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.inference.sessions import chosen_session
from loraplex.platform.web.console.addresses import day_of, path_of, query_form
from loraplex.platform.web.console.endpoint import redirect
from loraplex.platform.web.console.formatting import count, duration
from loraplex.platform.web.console.forms import Form, FormInvalid
from loraplex.platform.web.console.limit_units import unit_of
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.sorting import BY_ID
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage import request_queries as requests
from loraplex.platform.web.usage.choice_pages import with_choices
from loraplex.platform.web.usage.documents import SpanDocument
from loraplex.platform.web.usage.pages import CLASS_NAMES
from loraplex.tenants.errors import RequestNotFound
from loraplex.tenants.scopes import USAGE_READ
from loraplex.tenants.usage.records import REFUSED

PATH: Final = "/console/requests"
FIELDS: Final = ("outcome", "adapter", "key", "session", "slower", "from", "to")
MAX_SLOWER_MS: Final = 2**31 - 1
DAY: Final = timedelta(days=1)
PHASE_NAMES: Final = {
    "auth": "Authentication",
    "body": "Body",
    "prepare": "Prompt encoding",
    "admission": "Admission",
    "adapter_fetch": "Adapter fetch",
    "schema_check": "Schema check",
    "transport": "To the engine and back",
    "engine": "Engine, without a token",
    "queue": "Queue",
    "adapter_load": "Adapter load",
    "grammar_compile": "Grammar compile",
    "prefill": "Prefill",
    "journal": "Journal",
    "delivery": "Delivery of the first token",
    "decode": "Decode",
    "finish": "End of the response",
}
NOTICED_MS: Final = 1000
"""A person who waits for less goes on without losing the thread (Nielsen, Response Times)."""
OF_LIMITS: Final = ("rate_limit_exceeded", "insufficient_quota", "quota_unavailable")
"""The error codes that “Why was I limited?” explains."""


Reader = Annotated[PageRequest, opens(USAGE_READ)]

router = APIRouter()


@dataclass(frozen=True, slots=True)
class _Bar:
    """A phase on the request's clock; `left` and `width` in thousandths of its whole length."""

    name: str
    phase: SpanDocument
    left: int
    width: int


@router.get(PATH)
async def list_requests(page: Reader) -> Response:
    form = query_form(page.http)
    part = page.part(BY_ID)
    errors: Mapping[str, str] = {}
    asked = form.text("request").strip()
    if asked:
        with suppress(RequestNotFound):
            await page.query(requests.find, page.tenant_id, asked)
            return redirect(page.http, path_of("requests", asked))
    try:
        form = await with_choices(page, form)
        filters = _filters(form, page)
    except FormInvalid as invalid:
        filters, errors = requests.Filters(), invalid.errors
    async with page.reading() as session:
        choices = await usage.filter_choices(session, page.tenant_id)
        found = await requests.page(session, page.tenant_id, filters, part)
    return page.show(
        "usage/requests.html",
        form=form.entered(errors),
        choices=choices,
        page=page.rows(part, found.requests, more_after=found.more_after),
        outcomes=requests.OUTCOME_NAMES,
        filtered=any(form.text(name) for name in FIELDS),
        unknown=asked,
    )


@router.get(f"{PATH}/{{request_id}}")
async def show_request(page: Reader, request_id: str) -> Response:
    found = await page.query(requests.find, page.tenant_id, request_id)
    end = max([found.request.duration_ms or 0, *(phase.end_ms for phase in found.phases), 1])
    return page.show(
        "usage/refused.html" if found.request.outcome == REFUSED else "usage/request.html",
        found=found,
        limit_unit=unit_of,
        bars=[_bar(phase, end) for phase in found.phases if phase.duration_ms],
        end_ms=end,
        ticks=_ticks(end),
        main=main_sentence(found.phases, found.request.completion_tokens),
        limited=found.request.code in OF_LIMITS,
        token_classes=CLASS_NAMES,
        decode_ms=next((phase.duration_ms for phase in found.phases if phase.name == "decode"), None),
    )


def main_sentence(phases: Sequence[SpanDocument], tokens: int) -> str | None:
    """Say which phase took half of the time or more; None where none did, and for a request of less than `NOTICED_MS`."""
    whole = sum(each.duration_ms for each in phases)
    main = max(phases, key=lambda each: each.duration_ms, default=None)
    if main is None or whole < NOTICED_MS or main.duration_ms * 2 < whole:
        return None
    what = f"Most of the time went into “{PHASE_NAMES.get(main.name, main.name)}”"
    if main.name == "decode" and tokens > 1:
        gap_ms = main.duration_ms / (tokens - 1)
        return f"{what}: {count(tokens)} tokens at {duration(gap_ms)} each."
    return f"{what}, {duration(main.duration_ms)}{f': {main.reason}' if main.reason else ''}."


def _bar(phase: SpanDocument, end_ms: int) -> _Bar:
    left, width = phase.start_ms * 1000 // end_ms, phase.duration_ms * 1000 // end_ms
    return _Bar(PHASE_NAMES.get(phase.name, phase.name), phase, left, max(4, width))


def _ticks(end_ms: int) -> list[tuple[int, int]]:
    """Round times within the length, at most five, each with its place in thousandths."""
    step = next(
        size
        for power in range(10)
        for size in (10**power, 2 * 10**power, 5 * 10**power)
        if end_ms // size < 5
    )
    return [(at, at * 1000 // end_ms) for at in range(step, end_ms - step // 2, step)]


def _filters(form: Form, page: PageRequest) -> requests.Filters:
    """Read the filters. Raises `FormInvalid`."""
    base_model, slower = page.dependencies.served_model_name, form.text("slower")
    if slower and not (slower.isascii() and slower.isdecimal() and int(slower[:11]) <= MAX_SLOWER_MS):
        raise FormInvalid({"slower": f"“{slower[:40]}” is no number of milliseconds."})
    outcome, adapter, session = form.text("outcome"), form.text("adapter"), form.text("session")
    start = datetime.combine(day_of(form, "from", datetime.now(UTC).date()), time(), UTC)
    end = datetime.combine(day_of(form, "to", datetime.now(UTC).date()), time(), UTC) + DAY
    return requests.Filters(
        adapter=adapter if adapter and adapter != base_model else None,
        base_model=base_model if adapter == base_model else None,
        key_id=usage.key_id_of(form.text("key")) or None,
        outcome=outcome if outcome in requests.OUTCOME_NAMES else None,
        session=chosen_session(page.dependencies.derive_key, page.tenant_id, session) if session else None,
        start=start if form.text("from") else None,
        end=end if form.text("to") else None,
        slower_than_ms=int(slower) if slower else None,
    )
