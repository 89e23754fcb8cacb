"""`/console/usage`: what was used, by day and by adapter, key or kind of token; all of it as CSV and JSON.

Invariant: a download has exactly the rows that the page sums, from the same query.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Final, cast
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from loraplex.platform.web.console.addresses import chosen, day_of, link, path_of, query_form
from loraplex.platform.web.console.charts import MAX_SERIES
from loraplex.platform.web.console.forms import Form, FormInvalid
from loraplex.platform.web.console.page import PageRequest, opens
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.chart import usage_chart
from loraplex.platform.web.usage.choice_pages import with_choices
from loraplex.platform.web.usage.queries import (
    Bucket,
    Split,
    UsageFilters,
    UsageGroup,
    UsageReport,
)
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.scopes import ADAPTERS_READ, KEYS_WRITE, USAGE_READ

PATH: Final = "/console/usage"
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 400
MAX_DAYS_BY_HOUR: Final = 7
"""A longer range by the hour is cut to its last days: a page of more hours takes too long to read."""
SPLITS: Final = {"adapter": "adapter", "key": "key", "class": "kind of token"}
CLASS_NAMES: Final = {
    "uncached_prompt": "Prompt, not cached",
    "cached_prompt": "Prompt, cached",
    "completion": "Completion",
    "correction": "Correction",
    "reasoning": "Reasoning",
}
PAGES: Final = {"adapter": ("adapters", ADAPTERS_READ), "key": ("keys", KEYS_WRITE)}
"""The pages of what a report is split by, and the scope that they need."""
Download = Callable[..., AsyncIterator[str]]
Reader = Annotated[PageRequest, opens(USAGE_READ)]

router = APIRouter()


@dataclass(frozen=True, slots=True)
class _Group:
    """A row of the table by group. `number`: that of its series in the chart; `link`: the page of the adapter or the key."""

    name: str
    number: int
    link: str | None
    group: UsageGroup


@router.get(PATH)
async def show_usage(page: Reader) -> Response:
    now, form = datetime.now(UTC), query_form(page.http)
    errors: Mapping[str, str] = {}
    try:
        form = await with_choices(page, form)
        filters = _filters(form, page.tenant_id, now)
    except FormInvalid as invalid:
        errors, filters = invalid.errors, _filters(Form({}, {}), page.tenant_id, now)
    async with page.reading() as session:
        choices = await usage.filter_choices(session, page.tenant_id)
        currency = page.dependencies.currency_of(page.tenant_id)
        report = await usage.report(session, filters, currency)
    names = [_name(group, filters.split) for group in report.groups]
    return page.show(
        "usage/usage.html",
        form=form.entered(errors),
        filters=filters,
        choices=choices,
        report=report,
        groups=_groups(report, names, filters.split, page.session),
        chart_of=usage_chart(report, filters, names, now),
        splits=SPLITS,
        csv=_address(f"{PATH}.csv", filters, report.currency),
        json=_address(f"{PATH}.json", filters, report.currency),
        currency_links={each: _address(PATH, filters, each) for each in report.currencies},
    )


@router.get(f"{PATH}.csv")
async def download_csv(page: Reader) -> Response:
    return _download(page, usage.csv_download, "text/csv; charset=utf-8", "csv")


@router.get(f"{PATH}.json")
async def download_json(page: Reader) -> Response:
    return _download(page, usage.json_download, "application/json", "json")


def _download(page: PageRequest, write: Download, media_type: str, suffix: str) -> Response:
    filters = _filters(query_form(page.http), page.tenant_id, datetime.now(UTC))
    name = f"usage-{filters.first}-{filters.last}.{suffix}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(write(page.query, filters), media_type=media_type, headers=headers)


def _address(path: str, filters: UsageFilters, currency: str) -> str:
    """Return an address with these filters and the currency."""
    given = {
        "from": filters.first.isoformat(),
        "to": filters.last.isoformat(),
        "bucket": filters.bucket,
        "split": filters.split,
        "adapter": filters.adapter,
        "base_model": "1" if filters.base_model else None,
        "key": filters.key_id,
        "currency": currency,
    }
    return link(path, given)


def _filters(form: Form, tenant_id: UUID, now: datetime) -> UsageFilters:
    """Read the filters; without any, the current month by day and adapter. Raises `FormInvalid`."""
    today = now.date()
    last = day_of(form, "to", today)
    first = day_of(form, "from", last.replace(day=1))
    bucket = cast("Bucket", chosen(form, "bucket", ("1d", "1h")))
    days = (last - first).days + 1
    if days < 1:
        raise FormInvalid({"from": "The first day must not be after the last one."})
    if days > MAX_DAYS:
        raise FormInvalid({"from": f"At most {MAX_DAYS} days; these are {days:,}."})
    is_cut = bucket == "1h" and days > MAX_DAYS_BY_HOUR
    if is_cut:
        first = last - (MAX_DAYS_BY_HOUR - 1) * DAY
    return UsageFilters(
        tenant_id=tenant_id,
        start=datetime.combine(first, time(), UTC),
        end=datetime.combine(last + DAY, time(), UTC),
        bucket=bucket,
        group_by=frozenset({cast("Split", chosen(form, "split", tuple(SPLITS)))}),
        adapter=form.text("adapter") or None,
        base_model=form.text("base_model") == "1",
        key_id=usage.key_id_of(form.text("key")) or None,
        currency=form.text("currency") or None,
        is_cut=is_cut,
    )


def _groups(
    report: UsageReport, names: Sequence[str], split: Split, session: ConsoleSession
) -> tuple[_Group, ...]:
    """Return the rows of the table by group; those beyond the series of the chart have the number of the last one."""
    return tuple(
        _Group(name, min(place, MAX_SERIES), _link(group, split, session), group)
        for place, (name, group) in enumerate(zip(names, report.groups, strict=True), start=1)
    )


def _name(group: UsageGroup, split: Split) -> str:
    if group.kind != "named":
        return "base model" if group.kind == "base" else "other"
    name = group.name or group.id
    return CLASS_NAMES[name] if split == "class" else group.key_name or name


def _link(group: UsageGroup, split: Split, session: ConsoleSession) -> str | None:
    """The page of an adapter or a key, if the person may open it. Keys of the console itself have none."""
    folder, scope = PAGES.get(split, ("", ""))
    if group.name == group.id:
        return None
    if group.kind != "named" or group.name is None or scope not in session.scopes:
        return None
    return path_of(folder, group.name)
