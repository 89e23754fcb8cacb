"""A preview rates a month as if the draft had been a card all along: checked against the price table with the draft in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, text
from sqlalchemy.dialects.postgresql import Range
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.preview import rate, totals
from loraplex.tenants.billing.price_table import CardKey, CardVersions, PriceTable
from loraplex.tenants.billing.pricing import MAX_PRICE, Price, PriceVersion
from loraplex.tenants.billing.rate_card_records import RatedTotalDocument, RatedUsageDocument
from loraplex.tenants.billing.rate_cards import EVER, scope_of
from loraplex.tenants.database import Database
from loraplex.tenants.models import Adapter, RateCard, Tenant, UsageRollup
from loraplex.tenants.models import PriceVersion as PriceVersionRow
from loraplex.tenants.models.usage import NO_ID

FIRST, LAST = datetime(2026, 10, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
TIERS = {UUID(int=1): "gold", UUID(int=2): "free"}
ADAPTERS = {
    (tenant_id, name): UUID(int=10 * tenant_id.int + place)
    for tenant_id in TIERS
    for place, name in enumerate(("poet", "clerk"))
}
ALL = CardKey(None, None, None, "USD")
KEYS = [
    CardKey(tier, tenant_id, adapter_name, currency)
    for currency in ("USD", "EUR")
    for tier, tenant_id, adapter_name in (
        (None, None, None),
        ("gold", None, None),
        ("free", None, None),
        (None, UUID(int=1), None),
        (None, UUID(int=1), "poet"),
        (None, UUID(int=2), "clerk"),
    )
]
COUNTS = st.integers(0, 10**12)
MONTHS = """
    INSERT INTO monthly_rollups
    SELECT tenant_id, date_trunc('month', hour, 'UTC'), adapter_id, price_version_id, currency, sum(requests),
        sum(uncached_tokens), sum(cached_tokens), sum(completion_tokens), sum(amount_pico), sum(reasoning_tokens)
    FROM usage_rollups GROUP BY 1, 2, 3, 4, 5
"""


@st.composite
def prices(draw: st.DrawFn) -> Price:
    prompt = draw(st.integers(0, MAX_PRICE))
    return Price(
        prompt=prompt,
        cached_prompt=draw(st.integers(0, prompt)),
        completion=draw(st.integers(0, MAX_PRICE)),
        reasoning=draw(st.none() | st.integers(0, MAX_PRICE)),
    )


@dataclass(frozen=True)
class Row:
    """An hour's usage of one adapter, None for the base model. `tokens`: uncached, cached, answered and reasoned."""

    tenant_id: UUID
    adapter_name: str | None
    currency: str
    hour: datetime
    tokens: tuple[int, int, int, int]

    def amount(self, price: Price) -> int:
        uncached, cached, answered, reasoned = self.tokens
        return price.amount_pico(uncached + cached, cached, answered + reasoned, reasoned)


ROWS = st.builds(
    Row,
    st.sampled_from(sorted(TIERS)),
    st.sampled_from([None, "poet", "clerk"]),
    st.sampled_from(["USD", "EUR"]),
    st.sampled_from([FIRST - timedelta(hours=1), FIRST, LAST - timedelta(hours=1), LAST]),
    st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
)
# Every request of the rows has a price.
CARDS = st.dictionaries(st.sampled_from(KEYS), prices(), min_size=0).flatmap(
    lambda cards: st.tuples(prices(), prices()).map(
        lambda general: {ALL: general[0], ALL._replace(currency="EUR"): general[1], **cards}
    )
)


def price_of(cards: Mapping[CardKey, Price], row: Row) -> PriceVersion:
    table = PriceTable(
        cards={
            key: CardVersions((EVER,), (PriceVersion(id=uuid4(), currency=key.currency, price=price),))
            for key, price in cards.items()
        },
        default_currency=row.currency,
    )
    return table.price(row.tenant_id, TIERS[row.tenant_id], row.adapter_name, row.hour)


def governing(cards: Mapping[CardKey, Price], row: Row) -> CardKey:
    """The key of the card that prices the row, found by a price that no other card has."""
    marked = {key: Price(prompt=number) for number, key in enumerate(cards)}
    return [*cards][price_of(marked, row).price.prompt]


async def store(session: AsyncSession, cards: Mapping[CardKey, Price], rows: list[Row]) -> None:
    for tenant_id, tier in TIERS.items():
        await session.execute(insert(Tenant).values(id=tenant_id, name=f"tenant-{tenant_id.int}", tier=tier))
    for (tenant_id, name), adapter_id in ADAPTERS.items():
        await session.execute(insert(Adapter).values(id=adapter_id, tenant_id=tenant_id, name=name))
    versions = {}
    for number, (key, price) in enumerate(cards.items()):
        card = insert(RateCard).values(scope=scope_of(key), **key._asdict()).returning(RateCard.id)
        versions[key] = UUID(int=1000 + number)
        session.add(
            PriceVersionRow(
                id=versions[key],
                rate_card_id=(await session.scalars(card)).one(),
                version=1,
                prompt=price.prompt,
                cached_prompt=price.cached_prompt,
                completion=price.completion,
                reasoning=price.reasoning,
                effective=Range(EVER, None),
            )
        )
    for row in rows:
        key = governing(cards, row)
        uncached, cached, answered, reasoned = row.tokens
        session.add(
            UsageRollup(
                tenant_id=row.tenant_id,
                hour=row.hour,
                adapter_id=NO_ID if row.adapter_name is None else ADAPTERS[row.tenant_id, row.adapter_name],
                api_key_id=uuid4(),
                price_version_id=versions[key],
                currency=row.currency,
                requests=1,
                uncached_tokens=uncached,
                cached_tokens=cached,
                completion_tokens=answered + reasoned,
                reasoning_tokens=reasoned,
                amount_pico=row.amount(cards[key]),
            )
        )
    await session.flush()
    await session.execute(text(MONTHS))


def expected(
    cards: Mapping[CardKey, Price], rows: list[Row], draft: CardKey, price: Price
) -> dict[tuple[UUID, str], tuple[int, int]]:
    sums: dict[tuple[UUID, str], tuple[int, int]] = {}
    for row in rows:
        if FIRST <= row.hour < LAST:
            billed, drafted = sums.get((row.tenant_id, row.currency), (0, 0))
            billed += row.amount(price_of(cards, row).price)
            drafted += row.amount(price_of({**cards, draft: price}, row).price)
            sums[row.tenant_id, row.currency] = billed, drafted
    return sums


class Undone(Exception):
    """Rolls a transaction back at the end of an example."""


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cards=CARDS, rows=st.lists(ROWS, max_size=8), draft=st.sampled_from(KEYS), price=prices())
async def test_a_draft_prices_exactly_what_it_would_have_priced(
    database: Database, cards: dict[CardKey, Price], rows: list[Row], draft: CardKey, price: Price
) -> None:
    try:
        async with database.as_operator() as session:
            await session.execute(text("RESET ROLE"))
            await store(session, cards, rows)
            await session.execute(text("SET ROLE app_operator"))
            found = await rate(session, draft, price, FIRST)
            assert {
                (each.tenant_id, each.currency): (each.billed_pico, each.draft_pico) for each in found
            } == expected(cards, rows, draft, price)
            assert [(each.tenant_id, each.currency) for each in found] == sorted(
                (each.tenant_id, each.currency) for each in found
            )
            raise Undone
    except Undone:
        pass


async def test_usage_from_before_rate_cards_counts_as_priced_for_all(database: Database) -> None:
    row = Row(UUID(int=1), None, "USD", FIRST, (3, 2, 1, 0))
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await store(session, {ALL: Price(prompt=1)}, [row])
        await session.execute(text("UPDATE monthly_rollups SET price_version_id = :none"), {"none": NO_ID})
    async with database.as_operator() as session:
        found = await rate(session, ALL, Price(prompt=10, cached_prompt=5, completion=20), FIRST)
    assert found == [
        RatedUsageDocument(
            tenant_id=row.tenant_id,
            name="tenant-1",
            currency="USD",
            billed_pico=3,
            draft_pico=3 * 10 + 2 * 5 + 20,
        )
    ]


def test_totals_are_sums_by_currency() -> None:
    def rated(number: int, currency: str, billed: int, draft: int) -> RatedUsageDocument:
        return RatedUsageDocument(
            tenant_id=UUID(int=number), name="t", currency=currency, billed_pico=billed, draft_pico=draft
        )

    huge = 10**30
    assert totals([rated(1, "USD", huge, 1), rated(1, "EUR", 5, 6), rated(2, "USD", 1, huge)]) == [
        RatedTotalDocument(currency="EUR", billed_pico=5, draft_pico=6),
        RatedTotalDocument(currency="USD", billed_pico=huge + 1, draft_pico=huge + 1),
    ]
