"""The usage pages: totals, the largest groups and periods of a range, and all of its rows as CSV or JSON.

Invariant: one scan of the rollups per page, and every part adds up to the same totals, which are those of an invoice.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Final, Literal, TypeAlias, TypeVar
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.console.formatting import PICO_DIGITS
from loraplex.platform.web.responses import csv_text
from loraplex.platform.web.usage.documents import OperatorUsageDocument, UsageDocument, UsageSumsDocument
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.invoices.currencies import decimal_text
from loraplex.tenants.ledger import usage_reports
from loraplex.tenants.ledger.usage_reports import (
    UsageQuery,
    UsageRow,
    UsageSums,
    ranked_rows,
    refused_requests,
    totals_of,
    usage_rows,
)
from loraplex.tenants.models import NO_ID, Adapter, ApiKey
from loraplex.tenants.models.usage import REST
from loraplex.tenants.pages import Part
from loraplex.tenants.registry.adapters import AdapterRepository

NAMED_GROUPS: Final = {"tenant": 100, "adapter": 20, "key": 20}
"""Groups with a row of their own on the page. CSV and JSON have all."""
HOUR: Final = timedelta(hours=1)
MAX_CHOICES: Final = 50
"""What a field of keys or adapters offers at once; as one types, the server is asked for what matches."""
CLASS_ROWS: Final = 20_000
"""More rows than 400 days by the hour and class have: such a report is read whole."""
ROWS_AT_ONCE: Final = 5000
"""Rows of one transaction of a download."""
Bucket: TypeAlias = usage_reports.Bucket
Split: TypeAlias = Literal["tenant", "adapter", "key", "class"]
GroupKind: TypeAlias = Literal["named", "base", "rest"]
RunQuery: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a read, given with its arguments, in a transaction of its own and in the viewer's role."""
DocumentT = TypeVar("DocumentT", bound=UsageDocument)
SUMS: Final = tuple(UsageSumsDocument.model_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilters(UsageQuery):
    """The report that the API would give, by one dimension. `currency` None: the viewer's own where the range
    has several. `is_cut`: more was asked for than a page has.
    """

    is_cut: bool = False

    @property
    def split(self) -> Split:
        """The dimension."""
        (split,) = self.group_by
        return split

    @property
    def first(self) -> date:
        """The first day."""
        return self.start.date()

    @property
    def last(self) -> date:
        """The last day, included."""
        return (self.end - HOUR).date()


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageGroup:
    """One tenant, adapter, key or token class over the whole range. `kind`: `base` is the base model, `rest` all that have no row of
    their own. `name` is None for these two; that of a key is its public id, beside its `key_name`.
    """

    id: str
    kind: GroupKind
    name: str | None
    key_name: str | None
    sums: UsageSums


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePeriod:
    """One hour or day. `amounts`: pico-units by the ids of groups."""

    start: datetime
    sums: UsageSums
    amounts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """A range in one currency. `groups` by amount, the largest first; `periods` in time, those without usage left out.

    `currencies`: all that the range has usage in. `refused`: requests of the tenant that no engine worked on, which are in none
    of the sums; 0 in a report of all tenants.
    """

    currency: str
    currencies: tuple[str, ...]
    totals: UsageSums
    refused: int
    groups: tuple[UsageGroup, ...]
    periods: tuple[UsagePeriod, ...]


@dataclass(frozen=True, slots=True)
class FilterChoices:
    """What a field offers, at most `MAX_CHOICES` of each: names of adapters, and keys as `name (id)`."""

    adapters: tuple[str, ...]
    keys: tuple[str, ...]


async def filter_choices(session: AsyncSession, tenant_id: UUID, search: str = "") -> FilterChoices:
    """Read the tenant's adapters, by name, and its keys, the newest first, that `search` finds by name, and keys by id."""
    adapters = await AdapterRepository(session, tenant_id).page(None, MAX_CHOICES, search)
    keys = await KeyRepository(session).newest(tenant_id, None, Part(MAX_CHOICES), search)
    called = await keys_called(session, tenant_id, search) if search else []
    shown = dict.fromkeys([*called, *(f"{key.name} ({key.key_id})" for key in keys)])
    return FilterChoices(tuple(each.name for each in adapters), tuple(shown))


async def keys_called(session: AsyncSession, tenant_id: UUID, typed: str) -> list[str]:
    """Return the keys of this id, or of this name, at most two, as `filter_choices` writes them."""
    own = ApiKey.tenant_id == tenant_id, ApiKey.kind == "key"
    query = select(ApiKey.name, ApiKey.key_id).where(*own).limit(2)
    for found in (ApiKey.key_id == key_id_of(typed), ApiKey.name == typed):
        if rows := (await session.execute(query.where(found))).all():
            return [f"{name} ({key_id})" for name, key_id in rows]
    return []


async def adapter_existed(session: AsyncSession, tenant_id: UUID, name: str) -> bool:
    """Return whether the tenant has an adapter of this name, or had one: its usage stays."""
    own = Adapter.tenant_id == tenant_id, Adapter.name == name
    return await session.scalar(select(Adapter.id).where(*own).limit(1)) is not None


def key_id_of(choice: str) -> str:
    """Return the public id in `name (id)`; another text is an id itself."""
    return choice.rpartition(" (")[2].removesuffix(")")


async def report(session: AsyncSession, filters: UsageFilters, own_currency: str) -> UsageReport:
    """Read the page's report. Amounts of several currencies are never added: one is chosen."""
    if filters.split == "class":
        rows = await usage_rows(session, filters, None, CLASS_ROWS)
    else:
        rows = await ranked_rows(session, filters, filters.split, NAMED_GROUPS[filters.split])
    by_currency = totals_of(rows)
    currencies = tuple(by_currency)
    default = own_currency if own_currency in by_currency or not currencies else currencies[0]
    currency = filters.currency or default
    rows = [row for row in rows if row.currency == currency]
    return UsageReport(
        currency=currency,
        currencies=currencies,
        totals=by_currency.get(currency, UsageSums()),
        refused=0 if filters.tenant_id is None else await refused_requests(session, filters),
        groups=_groups(rows, filters.split),
        periods=_periods(rows, filters.split),
    )


def usage_document(row: UsageRow, kind: type[DocumentT]) -> DocumentT:
    """Return the row as the API has it; a tenant's documents name no tenant."""
    tenant_id = row.key.tenant_id
    return kind.model_validate(
        {
            **{name: getattr(row.sums, name) for name in SUMS},
            "tenant_id": tenant_id if tenant_id.int else None,
            "start": row.key.start,
            "adapter": row.adapter,
            "key_id": row.key_id,
            "token_class": row.token_class,
        }
    )


def columns_of(query: UsageQuery, kind: type[UsageDocument] = UsageDocument) -> list[str]:
    """Return the fields of a report's rows: what groups a row, then its sums, and the currency."""
    first = [*(["tenant_id"] if kind is OperatorUsageDocument else []), "start", "adapter", "key_id"]
    return [*first, *(["token_class"] if "class" in query.group_by else []), *SUMS, "currency"]


async def csv_download(
    run: RunQuery,
    query: UsageQuery,
    kind: type[UsageDocument] = UsageDocument,
    first: list[UsageRow] | None = None,
) -> AsyncIterator[str]:
    """Write all rows of a report as CSV (RFC 4180), in transactions of `ROWS_AT_ONCE`. `first`: those that were read already.

    Behind the fields of the API stand names and the amount in units of money. No text begins with a character that a spreadsheet
    computes.
    """
    tenant = ["tenant"] if kind is OperatorUsageDocument else []
    columns = [*columns_of(query, kind), *tenant, "key_name", "amount"]
    yield ",".join(columns) + "\r\n"
    async for rows in _all_rows(run, query, first):
        lines = io.StringIO()
        csv.DictWriter(lines, columns, extrasaction="ignore").writerows(map(_csv_fields, rows))
        yield lines.getvalue()


async def json_download(run: RunQuery, query: UsageQuery) -> AsyncIterator[str]:
    """Write all rows of a report as one JSON array of objects, with the fields of the API and the currency of each row."""
    columns = columns_of(query)
    separator = "["
    async for rows in _all_rows(run, query):
        for fields in map(_fields, rows):
            yield separator + json.dumps({name: fields[name] for name in columns})
            separator = ",\n"
    yield "]\n" if separator != "[" else "[]\n"


async def _all_rows(
    run: RunQuery, query: UsageQuery, first: list[UsageRow] | None = None
) -> AsyncIterator[list[UsageRow]]:
    """Read the rows of a report in stretches, each in a transaction of its own."""
    rows = await run(usage_rows, query, None, ROWS_AT_ONCE) if first is None else first
    while rows:
        yield rows
        rows = await run(usage_rows, query, rows[-1].key, ROWS_AT_ONCE) if len(rows) >= ROWS_AT_ONCE else []


def _fields(row: UsageRow) -> dict[str, Any]:
    document = usage_document(row, OperatorUsageDocument)
    return document.model_dump(mode="json") | {"currency": row.currency}


def _csv_fields(row: UsageRow) -> dict[str, Any]:
    amount = decimal_text(row.sums.amount_pico, PICO_DIGITS, scale=PICO_DIGITS)
    names = {"tenant": row.tenant, "key_name": csv_text(row.key_name)}
    return _fields(row) | names | {"amount": amount}


def _group_id(row: UsageRow, split: Split) -> str:
    if split == "class":
        return row.token_class or ""
    if split in ("tenant", "adapter"):
        return str(row.key.tenant_id if split == "tenant" else row.key.adapter_id)
    # The console makes a key every ten minutes: those of one page are one group, under its name.
    return row.console_key or str(row.key.api_key_id)


def _groups(rows: Sequence[UsageRow], split: Split) -> tuple[UsageGroup, ...]:
    sums: dict[str, UsageSums] = defaultdict(UsageSums)
    last: dict[str, UsageRow] = {}
    for row in rows:
        group = _group_id(row, split)
        sums[group] += row.sums
        last[group] = row
    groups = [_group(group, row, sums[group], split) for group, row in last.items()]
    return tuple(sorted(groups, key=lambda each: (each.kind == "rest", -each.sums.amount_pico, each.id)))


def _group(identity: str, row: UsageRow, sums: UsageSums, split: Split) -> UsageGroup:
    key = row.console_key or row.key_id
    names = {"tenant": row.tenant, "adapter": row.adapter, "key": key, "class": row.token_class}
    kind: GroupKind = "named"
    if identity == str(REST):
        kind = "rest"
    elif identity == str(NO_ID) and split == "adapter":
        kind = "base"
    name = names[split] if kind == "named" else None
    return UsageGroup(id=identity, kind=kind, name=name, key_name=row.key_name, sums=sums)


def _periods(rows: Sequence[UsageRow], split: Split) -> tuple[UsagePeriod, ...]:
    of: dict[datetime, list[UsageRow]] = defaultdict(list)
    for row in rows:
        of[row.key.start].append(row)
    periods = []
    for start, own in sorted(of.items()):
        amounts: dict[str, int] = defaultdict(int)
        for row in own:
            amounts[_group_id(row, split)] += row.sums.amount_pico
        periods.append(UsagePeriod(start=start, sums=totals_of(own)[own[0].currency], amounts=dict(amounts)))
    return tuple(periods)
