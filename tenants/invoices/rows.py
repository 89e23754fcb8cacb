"""Finds the ledger's rows behind a final invoice, for its export.

Invariant: the rows add up to its lines exactly, or `UsageIncomplete` is raised: a row that arrived later is on a later invoice.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy import Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import start_of
from loraplex.tenants.errors import InvalidField, InvoiceStateForbids, UsageIncomplete
from loraplex.tenants.ids import FIRST_TIME, uuid7_from
from loraplex.tenants.invoices.export import PricePeriod, UsageRow, write_export
from loraplex.tenants.invoices.invoices import InvoiceDetails, InvoiceRepository
from loraplex.tenants.invoices.lines import Charge, InvoiceLine, LineKey, UsageSum, charges_of
from loraplex.tenants.invoices.months import CLOCK_SKEW, Month
from loraplex.tenants.models import PriceVersion, UsageRecord

# `settled_at` is when a transaction began. One that began before the invoice read the usage may have ended after it, and a later
# one before it, but no transaction lasts longer than its timeouts.
RACE: Final = timedelta(minutes=2)
BATCH: Final = 5000
MAX_SETS: Final = 1 << 14
_Charges: TypeAlias = tuple[Charge, ...]
"""One charge for each line."""
_AMOUNTS: Final = (
    *(UsageRecord.uncached_tokens, UsageRecord.cached_tokens, UsageRecord.completion_tokens),
    *(UsageRecord.reasoning_tokens, UsageRecord.amount_pico),
)


async def export_invoice(session: AsyncSession, invoice_id: UUID, folder: Path) -> None:
    """Write a final invoice with all that recomputes it into a new folder, in a session of an operator.

    Raises `InvoiceNotFound`, `InvoiceStateForbids` for a draft, `UsageIncomplete` where rows of its months are deleted, and
    `InvalidField` for a folder that cannot be made.
    """
    repository = InvoiceRepository(session)
    invoice = await repository.details(await repository.by_id(invoice_id))
    found = InvoiceRows(invoice=invoice, session=session)
    await found.load()
    try:
        await write_export(folder, invoice, found.prices, found.billed, found.rows())
    except OSError as error:
        raise InvalidField("folder", f"{folder} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Group:
    month: Month
    adapter_id: UUID | None
    price_version_id: UUID | None


@dataclass(slots=True, kw_only=True)
class InvoiceRows:
    """What an export needs beside the invoice; `late`: ids of rows that were written while it became final, and are not on it."""

    invoice: InvoiceDetails
    session: AsyncSession
    prices: dict[UUID, PricePeriod] = field(default_factory=dict)
    billed: dict[LineKey, Charge] = field(default_factory=dict)
    late: set[UUID] = field(default_factory=set)

    async def load(self) -> None:
        """Read all but the rows. Raises `InvoiceStateForbids` for a draft, and `UsageIncomplete`."""
        if self.invoice.finalized_at is None:
            raise InvoiceStateForbids("a draft has no export: it is computed whenever it is read")
        sums: list[UsageSum] = []
        for month in self._months():
            sums += await self._sums(month)
        await self._load_prices({each.price_version_id for each in sums})
        charges = self._charges(sums)
        lines = {line.key: line for line in self.invoice.content.totals.lines if line.token_class is not None}
        for group in {_group(key) for key, line in lines.items() if charges.get(key) != _billed_until(line)}:
            charges |= await self._without_late_rows(group, charges, lines.values())
        for key, charge in charges.items():
            before = charge - _due(lines.get(key))
            if before != Charge():
                self.billed[key] = before

    async def rows(self) -> AsyncIterator[UsageRow]:
        """Read the rows, after `load`."""
        columns = (*(UsageRecord.id, UsageRecord.kind, UsageRecord.admitted_at), UsageRecord.adapter_id)
        for month in self._months():
            query = self._of_month(select(*columns, UsageRecord.price_version_id, *_AMOUNTS), month)
            query = query.order_by(UsageRecord.id).execution_options(yield_per=BATCH)
            async for row in await self.session.stream(query):
                if row.id not in self.late:
                    yield UsageRow(**row._mapping)

    def _months(self) -> Sequence[Month]:
        return sorted({line.month for line in self.invoice.content.totals.lines})

    def _of_month(self, query: Select[*tuple[Any, ...]], month: Month) -> Select[*tuple[Any, ...]]:
        """Narrow a query to the rows of a month that were settled before the invoice became final."""
        return query.where(
            UsageRecord.tenant_id == self.invoice.tenant_id,
            # An id is made by a gateway's clock, `admitted_at` is the counters'.
            or_(
                UsageRecord.id >= uuid7_from(month.begin - CLOCK_SKEW),
                UsageRecord.id < uuid7_from(FIRST_TIME),
            ),
            UsageRecord.admitted_at >= month.begin,
            UsageRecord.admitted_at < month.end,
            UsageRecord.currency == self.invoice.content.terms.currency,
            UsageRecord.settled_at <= self._finalized_at,
        )

    @property
    def _finalized_at(self) -> datetime:
        if self.invoice.finalized_at is None:
            raise ValueError(f"invoice {self.invoice.id} is a draft")
        return self.invoice.finalized_at

    async def _sums(self, month: Month) -> list[UsageSum]:
        group = (UsageRecord.adapter_id, UsageRecord.price_version_id)
        query = self._of_month(select(*group, *map(func.sum, _AMOUNTS)), month).group_by(*group)
        return [UsageSum.of(month, *row) for row in await self.session.execute(query)]

    async def _load_prices(self, ids: Collection[UUID | None]) -> None:
        query = select(PriceVersion).where(PriceVersion.id.in_([each for each in ids if each is not None]))
        for each in await self.session.scalars(query.order_by(PriceVersion.id)):
            self.prices[each.id] = PricePeriod(Price.of(each), start_of(each), each.effective.upper)

    def _charges(self, sums: Sequence[UsageSum]) -> dict[LineKey, Charge]:
        return charges_of(sums, {identity: period.price for identity, period in self.prices.items()})

    async def _without_late_rows(
        self, group: _Group, charges: dict[LineKey, Charge], lines: Collection[InvoiceLine]
    ) -> dict[LineKey, Charge]:
        """Leave out transactions of a group, from the newest on, so that the rest adds up to its lines."""
        expected = {line.key: _billed_until(line) for line in lines if _group(line.key) == group}
        rest = {key: charge for key, charge in charges.items() if _group(key) == group}
        columns = (
            UsageRecord.settled_at,
            UsageRecord.id,
            UsageRecord.adapter_id,
            UsageRecord.price_version_id,
        )
        query = self._of_month(select(*columns, *_AMOUNTS), group.month).where(
            UsageRecord.settled_at > self._finalized_at - RACE,
            UsageRecord.adapter_id.is_not_distinct_from(group.adapter_id),
            UsageRecord.price_version_id.is_not_distinct_from(group.price_version_id),
        )
        rows = (await self.session.execute(query.order_by(UsageRecord.settled_at.desc()))).all()
        written = [[*each] for _, each in groupby(rows, key=attrgetter("settled_at"))]
        transactions = [
            self._charges([UsageSum.of(group.month, *row[2:]) for row in each]) for each in written
        ]
        late = _adding_up(
            [tuple(each.get(key, Charge()) for key in expected) for each in transactions],
            tuple(rest.get(key, Charge()) - charge for key, charge in expected.items()),
        )
        if late is None:
            raise UsageIncomplete(
                f"the ledger's rows of {group.month} do not add up to this invoice: its retention has ended"
            )
        for number in late:
            self.late.update(row.id for row in written[number])
            for key, charge in transactions[number].items():
                rest[key] -= charge
        return rest


def _adding_up(transactions: Sequence[_Charges], total: _Charges) -> Sequence[int] | None:
    """Return the numbers of transactions that add up to `total`, as few of the first ones as possible; None: none do.

    Every set of the first ones is tried up to `MAX_SETS` of them, beyond that only all of them together.
    """
    prefix = (Charge(),) * len(total)
    sets: dict[_Charges, Sequence[int]] = {prefix: ()}
    for number, charges in enumerate(transactions):
        if total in sets:
            break
        prefix = _plus(prefix, charges)
        if len(sets) < MAX_SETS:
            for found, numbers in [*sets.items()]:
                sets.setdefault(_plus(found, charges), (*numbers, number))
        elif prefix == total:
            return range(number + 1)
    return sets.get(total)


def _plus(one: _Charges, other: _Charges) -> _Charges:
    return tuple(each + more for each, more in zip(one, other, strict=True))


def _group(key: LineKey) -> _Group:
    return _Group(key.month, key.adapter_id, key.price_version_id)


def _due(line: InvoiceLine | None) -> Charge:
    return Charge() if line is None else Charge(line.tokens, line.amount_pico)


def _billed_until(line: InvoiceLine) -> Charge:
    return line.billed + _due(line)
