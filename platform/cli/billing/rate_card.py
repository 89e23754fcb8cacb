"""`loraplex rate-card`: prices of all requests, of a tier, a tenant or an adapter, as versions with effective dates.

Invariant: prices are whole micro-units of money per million tokens, as on the operator plane.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.cli.command_context import (
    DataDir,
    async_command,
    command_unit_of_work,
    open_database,
)
from loraplex.platform.cli.output import AsJson, print_document, print_rows
from loraplex.tenants.accounts.tenants import TenantRepository, names_of
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_card_records import RateCardDocument
from loraplex.tenants.billing.rate_cards import RateCards
from loraplex.tenants.models.billing import CURRENCY
from loraplex.tenants.names import check_adapter_name, check_pattern, check_tier
from loraplex.tenants.rfc3339 import zoned_time

app = typer.Typer(
    name="rate-card", help="Prices of tokens, as versions with effective dates.", no_args_is_help=True
)

PAGE = 500
Tier = Annotated[str | None, typer.Option(help="Only requests of this tier.")]
TenantName = Annotated[
    str | None, typer.Option("--tenant", help="Only requests of this tenant, by its name.")
]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", help="Only requests of this adapter of the tenant.")
]
Currency = Annotated[str, typer.Option(help="ISO 4217, in capital letters.")]
Prompt = Annotated[int, typer.Option(min=0, help="Micro-units per million prompt tokens: 100000 is 0.10.")]
CachedPrompt = Annotated[
    int | None, typer.Option(min=0, help="The same for cached prompt tokens. Default: as --prompt.")
]
Completion = Annotated[int, typer.Option(min=0, help="The same for response tokens.")]
Reasoning = Annotated[
    int | None, typer.Option(min=0, help="The same for reasoning tokens. Default: as --completion.")
]
EffectiveFrom = Annotated[
    str | None, typer.Option(help="When it begins, such as 2030-01-31T12:00:00Z. Default: now.")
]
Month = Annotated[str | None, typer.Option(help="YYYY-MM, in UTC. Default: last month.")]
COLUMNS = ("currency", "applies_to", "effective_from", "prompt", "cached_prompt", "completion", "reasoning")
PREVIEW_COLUMNS = ("name", "currency", "billed_pico", "draft_pico")


@app.command()
@async_command
async def create(
    currency: Currency,
    prompt: Prompt,
    completion: Completion,
    cached_prompt: CachedPrompt = None,
    reasoning: Reasoning = None,
    tier: Tier = None,
    tenant: TenantName = None,
    adapter: AdapterName = None,
    effective_from: EffectiveFrom = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Add a version to a rate card. It ends its predecessor when it begins, and applies to later requests only."""
    check_scope(tier, tenant, adapter)
    begins = None if effective_from is None else read_time(effective_from)
    price = price_of(prompt, cached_prompt, completion, reasoning)
    async with command_unit_of_work(data_dir) as uow:
        key = await card_key(uow.session, currency, tier, tenant, adapter)
        made = await rate_cards.create(uow, key, price, begins)
    print_document(version_document(made), as_json)


@app.command("list")
@async_command
async def list_rate_cards(
    tenant: TenantName = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """List the versions of all rate cards, newest first."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        filters: dict[str, object] = {}
        if tenant is not None:
            filters["tenant_id"] = (await TenantRepository(session).get(tenant)).id
        documents = [version_document(each) for each in await all_versions(session, filters)]
        owners = {UUID(each["tenant_id"]) for each in documents if each["tenant_id"] is not None}
        names = await names_of(session, owners)
    if not as_json:
        documents = [{**each, "applies_to": applies_to(each, names)} for each in documents]
    print_rows(documents, as_json, COLUMNS)


@app.command()
@async_command
async def preview(
    currency: Currency,
    prompt: Prompt,
    completion: Completion,
    cached_prompt: CachedPrompt = None,
    reasoning: Reasoning = None,
    tier: Tier = None,
    tenant: TenantName = None,
    adapter: AdapterName = None,
    month: Month = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Rate a month's usage of every tenant under a draft of a card, without writing anything.

    The draft is taken to be in force all month; it prices what it covers, unless a more specific card did. A tier must be one
    that a tenant, a card or the plan of sign-up has.
    """
    check_scope(tier, tenant, adapter)
    price = price_of(prompt, cached_prompt, completion, reasoning)
    async with open_database(data_dir) as database, database.as_operator() as session:
        key = await card_key(session, currency, tier, tenant, adapter)
        found = await rate_cards.preview_draft(session, key, price, month)
    rated = [each.model_dump(mode="json") for each in found.rated]
    sums = [each.model_dump(mode="json") for each in found.totals]
    if as_json:
        print_document({"month": found.month, "data": rated, "totals": sums}, as_json)
    else:
        print_rows([*rated, *({"name": "total", **each} for each in sums)], as_json, PREVIEW_COLUMNS)


def check_scope(tier: str | None, tenant: str | None, adapter: str | None) -> None:
    if tier is not None and tenant is not None:
        raise typer.BadParameter("--tier and --tenant exclude each other")
    if adapter is not None and tenant is None:
        raise typer.BadParameter("--adapter needs --tenant, which it belongs to")


def read_time(text: str) -> datetime:
    """Parse a time with its zone."""
    time = zoned_time(text)
    if time is None:
        raise typer.BadParameter(f"{text[:80]}: write a time with its zone, such as 2030-01-31T12:00:00Z")
    return time


def price_of(prompt: int, cached_prompt: int | None, completion: int, reasoning: int | None) -> Price:
    """Return the price. Without one of their own, cached prompt tokens cost as much as others. Raises `InvalidField`."""
    cached = prompt if cached_prompt is None else cached_prompt
    return Price(prompt=prompt, cached_prompt=cached, completion=completion, reasoning=reasoning)


async def card_key(
    session: AsyncSession, currency: str, tier: str | None, tenant: str | None, adapter: str | None
) -> CardKey:
    """Return what a card applies to. Raises `InvalidField`, `TenantNotFound`."""
    check_pattern("currency", currency, CURRENCY, "three capital letters")
    return CardKey(
        tier=None if tier is None else check_tier(tier),
        tenant_id=None if tenant is None else (await TenantRepository(session).get(tenant)).id,
        adapter_name=None if adapter is None else check_adapter_name(adapter),
        currency=currency,
    )


async def all_versions(session: AsyncSession, filters: dict[str, object]) -> list[RateCardDocument]:
    """Read the versions of all pages."""
    cards, found = RateCards(session), list[RateCardDocument]()
    while page := await cards.page(filters, found[-1].id if found else None, PAGE):
        found += page
    return found


def applies_to(document: Mapping[str, Any], names: Mapping[UUID, str]) -> str:
    """Return what a version applies to as a text, such as `adapter poet of tenant harbor`."""
    owner = document["tenant_id"] and f"tenant {names[UUID(document['tenant_id'])]}"
    texts = {
        "tier": f"tier {document['tier']}",
        "tenant": owner,
        "adapter": f"adapter {document['adapter']} of {owner}",
    }
    return texts.get(document["scope"], "all")


def version_document(version: RateCardDocument) -> dict[str, Any]:
    ends = version.effective_to
    return {
        **rate_cards.snapshot(version),
        "id": str(version.id),
        "tenant_id": None if version.key.tenant_id is None else str(version.key.tenant_id),
        "effective_from": version.effective_from.astimezone(UTC).isoformat(),
        "effective_to": None if ends is None else ends.astimezone(UTC).isoformat(),
    }
