"""Rate cards as operators see them: every version on its card's time line, and the draft of a new one at last month's usage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.queries import tenant_named
from loraplex.tenants.accounts.tenants import names_of
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import RateCardDocument
from loraplex.tenants.billing.rate_cards import RateCards, scope_of
from loraplex.tenants.errors import InvalidField

MAX_VERSIONS: Final = 200
SCOPES: Final = ("all", "tier", "tenant", "adapter")
State: TypeAlias = Literal["past", "in force", "coming"]


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version of a card and whether it is past, in force or coming."""

    version: RateCardDocument
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One rate card with its versions, the newest start first. `tenant`: the name of its tenant, if it has one."""

    key: CardKey
    scope: str
    tenant: str | None
    versions: tuple[StatedVersion, ...]


async def cards(session: AsyncSession, now: datetime) -> tuple[Card, ...]:
    """Read the newest versions of all cards, as an operator: the general card first, then by what cards apply to."""
    found = await RateCards(session).page({}, None, MAX_VERSIONS)
    by_key: dict[CardKey, list[RateCardDocument]] = {}
    for each in found:
        by_key.setdefault(each.key, []).append(each)
    names = await names_of(session, {key.tenant_id for key in by_key if key.tenant_id is not None})
    return tuple(_card(key, by_key[key], names, now) for key in sorted(by_key, key=_place))


def _place(key: CardKey) -> tuple[int, str, str, str, str]:
    rank = SCOPES.index(scope_of(key))
    return rank, key.currency, key.tier or "", str(key.tenant_id or ""), key.adapter_name or ""


def _card(key: CardKey, found: Sequence[RateCardDocument], names: Mapping[UUID, str], now: datetime) -> Card:
    newest_first = sorted(found, key=lambda each: each.effective_from, reverse=True)
    return Card(
        key=key,
        scope=scope_of(key),
        tenant=None if key.tenant_id is None else names.get(key.tenant_id, str(key.tenant_id)),
        versions=tuple(StatedVersion(each, _state(each, now)) for each in newest_first),
    )


def _state(version: RateCardDocument, now: datetime) -> State:
    if version.effective_from > now:
        return "coming"
    ended = version.effective_to is not None and version.effective_to <= now
    return "past" if ended else "in force"


async def card_key(session: AsyncSession, tier: str, tenant: str, adapter: str, currency: str) -> CardKey:
    """Return what a card applies to, from the texts of a form; empty ones restrict nothing.

    Raises `InvalidField` for a tier beside a tenant, an adapter without one, and a tenant that does not exist.
    """
    if tier and tenant:
        raise InvalidField("tier", "a card applies to a tier or to a tenant, not to both")
    if adapter and not tenant:
        raise InvalidField("adapter", "an adapter needs the tenant that has it")
    tenant_id = await tenant_named(session, tenant) if tenant else None
    return CardKey(tier or None, tenant_id, adapter or None, currency)


async def rating(session: AsyncSession, key: CardKey, price: Price) -> rate_cards.Preview:
    """Rate last month's usage under a draft, as an operator: the tenant with the largest difference first. Nothing is written."""
    preview = await rate_cards.preview_draft(session, key, price)
    return replace(
        preview, rated=sorted(preview.rated, key=lambda each: -abs(each.draft_pico - each.billed_pico))
    )
