"""The prices of one gateway, in memory: admission asks them for every request and waits for no store.

Invariant: a price comes from one table as a whole. While PostgreSQL cannot be read, the last table stays in force.
"""

import asyncio
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby
from typing import Any, Final

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.price_table import CardKey, CardVersions, PriceTable
from loraplex.tenants.billing.pricing import Price, PriceVersion
from loraplex.tenants.billing.rate_cards import KEY_COLUMNS
from loraplex.tenants.billing.tenant_billing import TenantBillings, currency_of
from loraplex.tenants.database import Database
from loraplex.tenants.models import PriceEpoch, RateCard, TenantBilling
from loraplex.tenants.models import PriceVersion as PriceVersionRow
from loraplex.tenants.repetition import repeat

RELOAD_S: Final = 1.0
# Requests are admitted within minutes of now, whatever the clocks; versions that ended before are not needed.
KEPT: Final = timedelta(days=1)
LOG = structlog.get_logger("loraplex.prices")


class PriceBook:
    """`table`: the newest one. `epoch`: the number under which it was read."""

    def __init__(self, table: PriceTable, epoch: int = 0) -> None:
        self.table = table
        self._epoch = epoch
        self._compared_at = time.monotonic()

    @classmethod
    async def open(cls, database: Database) -> "PriceBook":
        """Read the prices. Raises `DatabaseUnavailable`."""
        async with database.as_writer() as session:
            # The epoch first: what changes in between is read once more.
            epoch = await _epoch(session)
            return cls(await load_table(session), epoch)

    @property
    def age_s(self) -> float:
        """Seconds since these prices were last known to be the newest."""
        return time.monotonic() - self._compared_at

    async def reload(self, database: Database) -> None:
        """Read the prices again if they have changed. Raises `DatabaseUnavailable`."""
        began = time.monotonic()
        async with database.as_writer() as session:
            epoch = await _epoch(session)
            if epoch != self._epoch:
                self.table = await load_table(session)
                self._epoch = epoch
        self._compared_at = began

    async def run(self, database: Database, every_s: float = RELOAD_S) -> None:
        """Reload again and again until cancelled."""

        async def reload() -> None:
            await self.reload(database)

        await asyncio.sleep(every_s)
        await repeat(LOG, reload, every_s, "prices could not be read; the last ones stay in force")


async def load_table(session: AsyncSession) -> PriceTable:
    """Read all cards that are or will be in force, and the currencies of tenants, as `app_writer`."""
    start = func.lower(PriceVersionRow.effective)
    needed = func.upper_inf(PriceVersionRow.effective) | (
        func.upper(PriceVersionRow.effective) > func.now() - KEPT
    )
    rows = await session.execute(
        select(*KEY_COLUMNS, start, PriceVersionRow)
        .join(RateCard, RateCard.id == PriceVersionRow.rate_card_id)
        .where(needed)
        .order_by(RateCard.id, start)
    )
    cards = {CardKey(*key): _versions(group) for key, group in groupby(rows, key=lambda row: tuple(row[:4]))}
    default = await TenantBillings(session).default_currency()
    own = await session.scalars(
        select(TenantBilling).where(
            func.num_nonnulls(TenantBilling.currency, TenantBilling.next_currency) > 0
        )
    )
    currencies = {row.tenant_id: currency_of(row, default) for row in own}
    return PriceTable(cards=cards, currencies=currencies, default_currency=default)


def _versions(rows: Iterable[Any]) -> CardVersions:
    starts, versions = [], []
    for _, _, _, currency, start, row in rows:
        starts.append(start)
        versions.append(PriceVersion(id=row.id, currency=currency, price=Price.of(row)))
    return CardVersions(tuple(starts), tuple(versions))


async def _epoch(session: AsyncSession) -> int:
    return await session.scalar(select(PriceEpoch.epoch)) or 0
