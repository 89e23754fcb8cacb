"""Sample usage of a demo tenant: the month before its first start, with a final invoice, and the present one until yesterday.

Invariant: the ledger settles its rows as those of requests, under a key that is named after them and ends with them. Their ids
follow from the tenant and its age: what an interrupted start repeats is not written twice.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from random import Random
from typing import Final
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import system_actor
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.billing import use_cases as billing
from loraplex.tenants.billing.pricing import PriceVersion
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7_derived, uuid7_from
from loraplex.tenants.invoices import use_cases
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.partitions import LedgerPartitions, LedgerRetention
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.reservation import RequestTimings, Reservation, ReservationRequest, SettledUsage
from loraplex.tenants.registry.resolution import ModelResolver
from loraplex.tenants.scopes import INFERENCE
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

SAMPLE_KEY: Final = "demo history"
"""The console's overview names it, too."""
ISSUER: Final = "loraplex demo: a sample, nothing is owed"
"""On every invoice of the demo's tenants."""
DAY: Final = timedelta(days=1)
SATURDAY: Final = 5
PREFIX_TOKENS: Final = 192
"""What the prompts of an application begin with, and the cache has."""


async def announce_history(uow: UnitOfWork, tenant_id: UUID) -> None:
    """Make the key of a new tenant's sample usage, whose text is not kept. `write_history` is due until it has ended."""
    await api_keys.create(uow, Operator(tenant_id), SAMPLE_KEY, [INFERENCE])
    await billing.change_billing(uow, tenant_id, {"issuer": ISSUER})


async def write_history(database: Database, tenant_id: UUID, adapter: str) -> None:
    """Write what was announced, and nothing where that is done. `adapter` has four of five requests, the base model the rest.

    Raises `DatabaseUnavailable`.
    """
    async with database.as_operator() as session:
        keys = await KeyRepository(session).list(tenant_id)
        key = next((each for each in keys if each.name == SAMPLE_KEY and each.revoked_at is None), None)
        card = await RateCards(session).oldest_for_all()
        # A card of the demo has no end yet; another installation's first one may not price the whole of last month.
        if key is None or card is None or card.effective_to is not None:
            return
        tenant = await TenantRepository(session).by_id(tenant_id)
        served = await ModelResolver(session, tenant_id).resolve(adapter)
    month = Month.of(tenant.created_at).previous
    price = PriceVersion(id=card.id, currency=card.key.currency, price=card.price)
    rows = []
    for number, (at, usage) in enumerate(_samples(Random(tenant.name), month.begin, tenant.created_at)):
        model = served if number % 5 else None
        request = ReservationRequest(
            id=uuid7_derived(uuid7_from(at), f"{tenant_id} {number}"),
            tenant_id=tenant_id,
            api_key_id=key.id,
            adapter_id=None if model is None else model.adapter_id,
            adapter_version=None if model is None else model.version,
            digest=None if model is None else model.digest,
            request_id=f"demo-history-{number}",
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )
        admitted = Reservation(request=request, **asdict(periods_of(at)), admitted_at=at, price=price)
        rows.append((admitted, usage.priced(price.price)))
    await LedgerPartitions(database.url, LedgerRetention()).add_month(month.begin)
    ledger = UsageLedger(database)
    try:
        await asyncio.gather(*(ledger.settle(*row) for row in rows))
    finally:
        await ledger.close()
    async with unit_of_work(database, system_actor("demo"), None, None) as uow:
        await use_cases.finalize(uow, tenant_id, month)
        await api_keys.revoke(uow, Operator(tenant_id), key.key_id)


def _samples(random: Random, begin: datetime, end: datetime) -> Iterator[tuple[datetime, SettledUsage]]:
    """Requests of the whole days from `begin` to `end`: most in working hours, few at weekends, a batch of prompts at night."""
    for midnight in (begin + number * DAY for number in range((end - begin) // DAY)):
        is_weekend = midnight.weekday() >= SATURDAY
        singles = random.randint(0, 1) if is_weekend else random.randint(1, 4)
        batches = [] if is_weekend else [(2 + random.random() / 6, random.randint(48, 128))]
        for hour, prompts in batches + [(random.triangular(6, 21, 14), 1) for _ in range(singles)]:
            ttft_ms, tokens = round(random.lognormvariate(5, 0.5)), round(random.lognormvariate(4.5, 0.5))
            yield (
                midnight + timedelta(hours=hour),
                SettledUsage(
                    outcome="aborted" if random.random() < 0.03 else "completed",
                    prompt_tokens=prompts * (PREFIX_TOKENS + round(random.lognormvariate(5.5, 0.7))),
                    cached_tokens=PREFIX_TOKENS * (prompts - 1 + random.randint(0, 1)),
                    completion_tokens=prompts * tokens,
                    timings=RequestTimings(ttft_ms=ttft_ms, duration_ms=ttft_ms + 30 * tokens),
                ),
            )
