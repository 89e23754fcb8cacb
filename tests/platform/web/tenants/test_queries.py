"""What operators read: tenants with a day's use, rate cards on their time lines, drift, storage."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.dialects.postgresql import insert
from tests.platform.engines.managed_engine import Managed
from tests.tenants.invoices.billed_tenant import make_billed_tenant
from tests.tenants.listing_part import Part
from tests.tenants.registry_records import make_tenant

from loraplex.adapters.errors import BlobStoreUnavailable
from loraplex.adapters.storage.free_space import DiskSpace
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.web.engine import health
from loraplex.platform.web.engine import queries as engine
from loraplex.platform.web.rate_cards import queries as rate_cards
from loraplex.platform.web.tenants import queries as tenants
from loraplex.tenants.actors import system_actor
from loraplex.tenants.admission.counter_drift import MAX_KEPT, CounterDrift, DriftLog
from loraplex.tenants.billing import use_cases as cards
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import Quota, UsageTotal
from loraplex.tenants.periods import periods_of
from loraplex.tenants.unit_of_work import unit_of_work

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


async def test_tenants_with_a_days_use_and_their_nearest_limits(database: Database) -> None:
    tenant = await make_billed_tenant(database, "harbor")
    for name in ("acme", "hangar"):
        await make_tenant(database, name)
    await tenant.use(NOW, 1_000_000)
    await tenant.use(NOW - timedelta(days=2), 5)
    async with database.as_writer() as session:
        month = periods_of(NOW).month
        total = {"tenant_id": tenant.id, "level": "tenant", "subject_id": tenant.id, "period": month}
        await session.execute(insert(UsageTotal).values(**total, requests=1, tokens=5, amount_nano=1_700_000))
    async with database.as_operator() as session:
        session.add(Quota(tenant_id=tenant.id, budget_per_month=2000, tokens_per_month=100))
    async with database.as_operator() as session:
        first = await tenants.tenants(session, NOW, "", Part(None, 2))
        rest = await tenants.tenants(session, NOW, "", Part(first[-1].tenant.name, 2))
        matching = await tenants.tenants(session, NOW, "han", Part(None, 2))
        detail = await tenants.tenant(session, tenant.id, NOW)
    assert [row.tenant.name for row in (*first, *rest)] == ["acme", "hangar", "harbor"]
    assert [row.tenant.name for row in matching] == ["hangar"]
    harbor = rest[0].activity
    assert (harbor.requests, harbor.spend_pico) == (1, {"USD": 1_500_000 * 10**6})
    assert [(near.name, near.percent) for near in harbor.near] == [("budget_per_month", 85)]
    assert (detail.tenant.state, detail.quotas.limits.budget_per_month, detail.billing.currency) == (
        "active",
        2000,
        "USD",
    )


async def test_rate_cards_stand_on_their_time_lines(database: Database) -> None:
    tenant = await make_billed_tenant(database, "harbor")
    await tenant.use(NOW.replace(day=1) - timedelta(days=2), 1_000_000)
    async with database.as_operator() as session:
        key = await rate_cards.card_key(session, "", "harbor", "", "USD")
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        await cards.create(uow, key, Price(prompt=1), NOW + timedelta(days=1))
    async with database.as_operator() as session:
        (card,) = await rate_cards.cards(session, NOW)
        (later,) = await rate_cards.cards(session, NOW + timedelta(days=2))
        rated = await rate_cards.rating(session, key, Price(prompt=3_000_000))
    assert (card.scope, card.tenant) == ("tenant", "harbor")
    assert [each.state for each in card.versions] == ["coming", "in force"]
    assert [each.state for each in later.versions] == ["in force", "past"]
    assert [(row.name, row.draft_pico - row.billed_pico) for row in rated.rated] == [
        ("harbor", 1_500_000 * 10**6)
    ]


async def test_drift_is_named_by_tenant_until_it_is_corrected(database: Database) -> None:
    tenant_id, log = await make_tenant(database, "acme"), DriftLog(lambda: NOW)
    uses = (PeriodUse("d:2026-01-01", 0, 0), PeriodUse("m:2026-01", 7, -3))
    log.compared(tenant_id, CounterDrift(1, uses))
    async with database.as_operator() as session:
        (row,) = await engine.drift_rows(session, log)
    assert (row.tenant, row.use.period, row.use.tokens, row.use.amount_pico) == (
        "acme",
        "m:2026-01",
        7,
        -3000,
    )
    assert (log.open, row.finding.since, row.finding.corrected_at) == (1, NOW, None)
    log.corrected(tenant_id)
    log.compared(tenant_id, None)
    assert log.findings[0].corrected_at == NOW and (log.comparisons, log.open) == (2, 0)
    for _ in range(MAX_KEPT + 5):
        log.compared(uuid7(), CounterDrift(1, uses))
    assert len(log.findings) == MAX_KEPT
    agreeing = DriftLog()
    agreeing.compared(tenant_id, CounterDrift(1, uses))
    agreeing.compared(tenant_id, None)
    assert agreeing.findings == () and agreeing.compared_at is not None


async def test_an_engine_that_does_not_answer_keeps_its_last_numbers(database: Database) -> None:
    lost = Managed()
    lost.connected, lost.failure = False, "it keeps failing"
    lost.known_stats, lost.known_at = EngineStats(running=3, resident_adapters=["a" * 64]), NOW
    states = await engine.engine_states(EnginePool([lost, Managed()]), NOW)
    assert [(each.number, each.connected) for each in states] == [(0, False), (1, True)]
    assert states[0].stats is not None and (states[0].stats.running, states[0].known_at) == (3, NOW)
    async with database.as_operator() as session:
        assert await engine.adapter_names(session, states) == {}


class Storage:
    """The part of `Uploads` that is asked. `error`: what the blob store raises."""

    def __init__(self, error: Exception | None, free: int) -> None:
        self.error, self.free = error, free
        self.limits = type("Limits", (), {"storage_floor_bytes": 100})

    async def disk_space(self) -> DiskSpace:
        return DiskSpace(1000, self.free)

    async def require_store(self) -> None:
        if self.error is not None:
            raise self.error


async def test_storage_that_is_away_or_full_is_said() -> None:
    async def ask(error: Exception | None, free: int = 500) -> health.StorageHealth:
        storage: Any = Storage(error, free)
        return await health.storage_health(storage)

    assert (await ask(None)).store_error is None and not (await ask(None)).is_full
    away = await ask(BlobStoreUnavailable("the bucket does not answer"))
    assert away.store_error == "the bucket does not answer" and away.disk == DiskSpace(1000, 500)
    assert (await ask(None, 99)).is_full
