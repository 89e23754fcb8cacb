"""`/console/usage`: what was used, by day and by adapter, key or kind of token; all of it as CSV and JSON.

Invariant: a download has exactly the rows that the page sums, from the same query.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Annotated, Final, cast
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.web.console.addresses import chosen, day_of, link, path_of, query_form
from loraplex.platform.web.console.charts import MAX_SERIES, ChartRow, Series, named, symbol
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Form, FormInvalid
from loraplex.platform.web.usage import queries as usage
from loraplex.platform.web.usage.queries import (
    Bucket,
    FilterChoices,
    RunQuery,
    Split,
    UsageFilters,
    UsageGroup,
    UsagePeriod,
    UsageReport,
)

PATH: Final = "/console/usage"
USAGE_READ: Final = "usage:read"
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
}
Download = Callable[..., AsyncIterator[str]]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The filters of the page: `first` and `last` day, both included, and the report's own. `is_cut`: the range was longer."""

    first: date
    last: date
    filters: UsageFilters
    is_cut: bool

    def query(self) -> dict[str, str | None]:
        """The query string that leads here again."""
        return {
            "from": self.first.isoformat(),
            "to": self.last.isoformat(),
            "bucket": self.filters.bucket,
            "split": self.filters.split,
            "adapter": self.filters.adapter,
            "base_model": "1" if self.filters.base_model else None,
            "key": self.filters.key_id,
            "currency": self.filters.currency,
        }


def usage_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the usage page and its downloads."""
    router = APIRouter()
    reader = Depends(endpoint.requires(USAGE_READ))

    @router.get(PATH)
    async def show(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        tenant_id, now = cast("UUID", session.tenant_id), datetime.now(UTC)
        form = query_form(request)
        currency = endpoint.dependencies.currency_of(tenant_id)
        errors: Mapping[str, str] = {}
        try:
            selected = _chosen(form, now)
        except FormInvalid as invalid:
            errors, selected = invalid.errors, _chosen(Form({}, {}), now)

        async def read(transaction: AsyncSession) -> tuple[FilterChoices, UsageReport]:
            choices = await usage.filter_choices(transaction, tenant_id)
            return choices, await usage.report(transaction, tenant_id, selected.filters, currency)

        choices, report = await endpoint.query(session, read)
        downloads = {**selected.query(), "currency": report.currency}
        return endpoint.page(
            request,
            session,
            "usage/usage.html",
            status=422 if errors else 200,
            form=form.entered(errors),
            selected=selected,
            choices=choices,
            report=report,
            shown=_shown(report, selected, choices, session, now),
            splits=SPLITS,
            csv=link(f"{PATH}.csv", downloads),
            json=link(f"{PATH}.json", downloads),
            currency_links={
                each: link(PATH, {**selected.query(), "currency": each}) for each in report.currencies
            },
        )

    _add_downloads(router, endpoint)
    return router


def _add_downloads(router: APIRouter, endpoint: ConsoleEndpoint) -> None:
    reader = Depends(endpoint.requires(USAGE_READ))

    @router.get(f"{PATH}.csv")
    async def csv(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        return await download(request, session, usage.csv_download, "text/csv; charset=utf-8", "csv")

    @router.get(f"{PATH}.json")
    async def json(request: Request, session: Annotated[ConsoleSession, reader]) -> Response:
        return await download(request, session, usage.json_download, "application/json", "json")

    async def download(
        request: Request, session: ConsoleSession, write: Download, media_type: str, suffix: str
    ) -> Response:
        selected = _chosen(query_form(request), datetime.now(UTC))
        query = selected.filters.query(cast("UUID", session.tenant_id))
        run = cast("RunQuery", partial(endpoint.query, session))
        name = f"usage-{selected.first}-{selected.last}.{suffix}"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(write(run, query), media_type=media_type, headers=headers)


def _chosen(form: Form, now: datetime) -> _Chosen:
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
    filters = UsageFilters(
        start=datetime.combine(first, time(), UTC),
        end=datetime.combine(last + DAY, time(), UTC),
        bucket=bucket,
        split=cast("Split", chosen(form, "split", tuple(SPLITS))),
        adapter=form.text("adapter") or None,
        base_model=form.text("base_model") == "1",
        key_id=form.text("key") or None,
        currency=form.text("currency") or None,
    )
    return _Chosen(first, last, filters, is_cut)


@dataclass(frozen=True, slots=True)
class _Group:
    """A row of the table by group. `number`: that of its series in the chart; `link`: the page of the adapter or the key."""

    name: str
    number: int
    link: str | None
    group: UsageGroup


@dataclass(frozen=True, slots=True)
class _Shown:
    """`periods`: each with its row of the chart, in pico-units of money; `totals`: the sums of the series over all of them.
    `prefix`: what stands before an amount.
    """

    groups: tuple[_Group, ...]
    series: tuple[Series, ...]
    periods: tuple[tuple[UsagePeriod, ChartRow], ...]
    totals: tuple[int, ...]
    prefix: str


def _shown(
    report: UsageReport, selected: _Chosen, choices: FilterChoices, session: ConsoleSession, now: datetime
) -> _Shown:
    keys, split = dict(choices.keys), selected.filters.split
    names = [_name(group, split, keys) for group in report.groups]
    own = len(names) if len(names) <= MAX_SERIES else MAX_SERIES - 1
    series = named([*names[:own], *(["other"] if len(names) > own else [])])
    step = DAY if selected.filters.bucket == "1d" else timedelta(hours=1)
    ids = [group.id for group in report.groups]
    rows = []
    for period in report.periods:
        values = _folded([period.amounts.get(each, 0) for each in ids], own)
        rows.append((period, ChartRow(period.start, values, period.start <= now < period.start + step)))
    groups = tuple(
        _Group(name, min(place, MAX_SERIES), _link(group, split, session), group)
        for place, (name, group) in enumerate(zip(names, report.groups, strict=True), start=1)
    )
    totals = _folded([group.sums.amount_pico for group in report.groups], own)
    return _Shown(groups, series, tuple(rows), totals, symbol(report.currency))


def _folded(amounts: list[int], own: int) -> tuple[int, ...]:
    """The amounts of the groups with a series of their own, and the sum of the others if there are any."""
    return (*amounts[:own], *([sum(amounts[own:])] if len(amounts) > own else []))


def _name(group: UsageGroup, split: Split, keys: Mapping[str, str]) -> str:
    if group.kind != "named":
        return "base model" if group.kind == "base" else "other"
    name = group.name or group.id
    if split == "class":
        return CLASS_NAMES[name]
    return keys.get(name, name) if split == "key" else name


def _link(group: UsageGroup, split: Split, session: ConsoleSession) -> str | None:
    """The page of an adapter or a key, if the person may open it. Keys of the console itself have none."""
    folder, scope = _PAGES.get(split, ("", ""))
    if group.name == group.id:
        return None
    if group.kind != "named" or group.name is None or scope not in session.scopes:
        return None
    return path_of(folder, group.name)


_PAGES: Final = {"adapter": ("adapters", "adapters:read"), "key": ("keys", "keys:write")}
