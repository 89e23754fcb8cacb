"""Rate cards in PostgreSQL: each creation adds a version, which ends the one before it.

Invariant: from its first version on, a card has exactly one price at any time, and none that was in force ever changes.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import ColumnElement, Row, Select, func, select, text
from sqlalchemy.dialects.postgresql import Range, insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import PricesDocument, RateCardDocument, scope_document
from loraplex.tenants.errors import InUse, InvalidField
from loraplex.tenants.ids import EPOCH, uuid7
from loraplex.tenants.models import PriceVersion, RateCard

# Gateways read new cards once a second, so a price is known everywhere before it begins.
NOTICE: Final = timedelta(seconds=2)
MAX_AHEAD: Final = timedelta(days=3660)
MAX_STANDING: Final = 200
EVER: Final = EPOCH
"""The start of a price that has always been in force."""
# Creations run one at a time: a card is rarely made, and the first gateways of an installation may start together.
LOCK: Final = text("SELECT pg_advisory_xact_lock(hashtext('loraplex.rate_cards'))")
FILTERS: Final = {
    "id": PriceVersion.id,
    "tenant_id": RateCard.tenant_id,
    "tier": RateCard.tier,
    "adapter": RateCard.adapter_name,
    "currency": RateCard.currency,
}


def scope_of(key: CardKey) -> str:
    """What a card applies to, in one word: `all`, `tier`, `tenant` or `adapter`."""
    if key.tenant_id is not None:
        return "tenant" if key.adapter_name is None else "adapter"
    return "all" if key.tier is None else "tier"


class RateCards:
    """The rate cards seen by one session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, key: CardKey, price: Price, effective_from: datetime | None) -> RateCardDocument:
        """Add a version to the card of `key`, which is created if missing. It ends the version in force at its start, and ends
        where a later one begins.

        None for `effective_from`: now. What lies within `NOTICE` is moved to its end. Raises `InUse` for the past, and for a
        moment at which a version begins already; `InvalidField` for one beyond `MAX_AHEAD`.
        """
        await self._session.execute(LOCK)
        now: datetime = (await self._session.execute(select(func.clock_timestamp()))).scalar_one()
        if effective_from is not None and effective_from > now + MAX_AHEAD:
            raise InvalidField(
                "effective_from", f"effective_from must be at most {MAX_AHEAD.days} days ahead"
            )
        if effective_from is not None and effective_from < now:
            raise InUse(
                f"the price would begin in the past, at {effective_from.isoformat()}; it is {now.isoformat()}"
            )
        return await self._add(key, price, max(effective_from or now, now + NOTICE))

    async def create_first(self, currency: str, price: Price) -> RateCardDocument | None:
        """Create the card for all requests of an installation that has none, in force at all times; None if it has one."""
        await self._session.execute(LOCK)
        if await self.oldest_for_all() is not None:
            return None
        return await self._add(CardKey(None, None, None, currency), price, EVER)

    async def oldest_for_all(self) -> RateCardDocument | None:
        """The first version of the first card for all requests: its currency is that of the installation."""
        oldest = (
            _versions().where(RateCard.scope == "all").order_by(RateCard.id, PriceVersion.version).limit(1)
        )
        row = (await self._session.execute(oldest)).one_or_none()
        return None if row is None else _document(row)

    async def page(
        self, filters: Mapping[str, object], after: UUID | None, limit: int
    ) -> Sequence[RateCardDocument]:
        """At most `limit` versions, newest first, behind the version `after`. `filters`: names of `FILTERS` with a value each."""
        chosen = [FILTERS[name] == value for name, value in filters.items()]
        return await self._newest(chosen, after, limit)

    async def covering(
        self, tenant_id: UUID, tier: str, currencies: Sequence[str], after: UUID | None, limit: int
    ) -> Sequence[RateCardDocument]:
        """At most `limit` versions in these currencies that cover a tenant of this tier, newest first, behind `after`."""
        return await self._newest(_covers(tenant_id, tier, currencies), after, limit)

    async def _newest(
        self, conditions: Sequence[ColumnElement[bool]], after: UUID | None, limit: int
    ) -> Sequence[RateCardDocument]:
        query = _versions().where(*conditions).order_by(PriceVersion.id.desc()).limit(limit)
        if after is not None:
            query = query.where(PriceVersion.id < after)
        return [_document(row) for row in await self._session.execute(query)]

    async def standing(
        self, tenant_id: UUID, tier: str, currencies: Sequence[str], at: datetime
    ) -> Sequence[RateCardDocument]:
        """The versions that cover a tenant of this tier at that time or later, by their starts; at most `MAX_STANDING`."""
        ends = func.upper(PriceVersion.effective)
        query = _versions().where(*_covers(tenant_id, tier, currencies), ends.is_(None) | (ends > at))
        query = query.order_by(func.lower(PriceVersion.effective), PriceVersion.id).limit(MAX_STANDING)
        return [_document(row) for row in await self._session.execute(query)]

    async def _add(self, key: CardKey, price: Price, begins: datetime) -> RateCardDocument:
        card_id = await self._card(key)
        versions = (
            await self._session.scalars(select(PriceVersion).where(PriceVersion.rate_card_id == card_id))
        ).all()
        starts = [start_of(each) for each in versions]
        if begins in starts:
            raise InUse(f"a price of this card begins at {begins.isoformat()} already; choose another moment")
        ends = min((start for start in starts if start > begins), default=None)
        before = max((each for each in versions if start_of(each) < begins), key=start_of, default=None)
        if before is not None:
            before.effective = Range(start_of(before), begins)
            # Ranges must not overlap, and the unit of work would insert first.
            await self._session.flush()
        row = PriceVersion(
            id=uuid7(),
            rate_card_id=card_id,
            version=max((each.version for each in versions), default=0) + 1,
            prompt=price.prompt,
            cached_prompt=price.cached_prompt,
            completion=price.completion,
            reasoning=price.reasoning,
            effective=Range(begins, ends),
        )
        self._session.add(row)
        await self._session.flush()
        return _document_of(row, key)

    async def _card(self, key: CardKey) -> int:
        """The id of the card, which is created if missing. Called under `LOCK`."""
        found = select(RateCard.id).where(
            *(column.is_not_distinct_from(value) for column, value in zip(KEY_COLUMNS, key, strict=True))
        )
        card_id = (await self._session.scalars(found)).one_or_none()
        if card_id is None:
            made = insert(RateCard).values(
                scope=scope_of(key),
                tier=key.tier,
                tenant_id=key.tenant_id,
                adapter_name=key.adapter_name,
                currency=key.currency,
            )
            card_id = (await self._session.scalars(made.returning(RateCard.id))).one()
        return card_id


KEY_COLUMNS: Final = (RateCard.tier, RateCard.tenant_id, RateCard.adapter_name, RateCard.currency)


def _covers(tenant_id: UUID, tier: str, currencies: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    return (
        RateCard.currency.in_(currencies),
        (RateCard.tenant_id == tenant_id) | RateCard.tenant_id.is_(None),
        (RateCard.tier == tier) | RateCard.tier.is_(None),
    )


def start_of(version: PriceVersion) -> datetime:
    """The moment from which a version applies."""
    start = version.effective.lower
    if start is None:
        raise ValueError(f"price version {version.id} has no start")
    return start


def _versions() -> Select[PriceVersion, str | None, UUID | None, str | None, str]:
    return select(PriceVersion, *KEY_COLUMNS).join(RateCard, RateCard.id == PriceVersion.rate_card_id)


def _document(row: Row[PriceVersion, str | None, UUID | None, str | None, str]) -> RateCardDocument:
    version, tier, tenant_id, adapter_name, currency = row
    return _document_of(version, CardKey(tier, tenant_id, adapter_name, currency))


def _document_of(row: PriceVersion, key: CardKey) -> RateCardDocument:
    return RateCardDocument(
        id=row.id,
        version=row.version,
        scope=scope_document(key),
        currency=key.currency,
        prices=PricesDocument.model_validate(row),
        effective_from=start_of(row),
        effective_to=row.effective.upper,
        created_at=row.created_at,
    )
