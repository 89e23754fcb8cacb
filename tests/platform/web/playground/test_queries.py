"""The models of the playground, as their tenant calls and pays for them, and the bounds of its parameters."""

from uuid import UUID

from tests.platform.parameters.request_parts import read_parameters
from tests.tenants.registry_records import AliasWriter, RegistryWriter

from loraplex.platform.web.playground.queries import (
    FIRST,
    FURTHER,
    PlaygroundModel,
    find_models,
    parameter_fields,
)
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.billing.rate_cards import EVER, RateCards
from loraplex.tenants.database import Database
from loraplex.tenants.registry.records import AdapterProfile

FOR_ALL = Price(prompt=100_000, cached_prompt=10_000, completion=400_000)
FOR_PIRATE = Price(prompt=200_000, cached_prompt=20_000, completion=800_000)


async def tenant_with_pirate(database: Database, name: str) -> UUID:
    """A tenant with two versions of `pirate`, the older one in production."""
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).create(name)).id
        adapters, aliases = RegistryWriter(session, tenant_id), AliasWriter(session, tenant_id)
        await adapters.get_or_create("pirate")
        for digest in ("a" * 64, "b" * 64):
            await adapters.add_version(
                "pirate",
                digest=digest,
                size_bytes=1,
                rank=8,
                config={},
                report={},
                profile=AdapterProfile("hermes", {"temperature": 0.2}, "think"),
            )
        await aliases.set("pirate", "production", {1: 100})
        await aliases.set("pirate", "canary", {1: 10, 2: 90})
        return tenant_id


async def models_of(database: Database, tenant_id: UUID) -> dict[str, PlaygroundModel]:
    async with database.as_tenant(tenant_id) as session:
        return {each.name: each for each in await find_models(session, tenant_id, "base")}


async def test_a_tenant_sees_its_own_models_with_the_prices_that_it_pays(database: Database) -> None:
    async with database.as_operator() as session:
        await RateCards(session).create_first("USD", FOR_ALL)
    harbor, other = [await tenant_with_pirate(database, name) for name in ("harbor", "other")]
    key = CardKey(None, harbor, "pirate", "USD")
    async with database.as_operator() as session:
        # In force at all times, as a card that has begun is.
        await RateCards(session)._add(key, FOR_PIRATE, EVER)
    models = await models_of(database, harbor)
    assert [*models] == ["pirate:canary", "pirate", "pirate@2", "pirate@1", "base"]
    assert [each.kind for each in models.values()] == ["alias", "alias", "version", "version", "base"]
    assert models["pirate"].digest == "a" * 64 and models["pirate:canary"].digest == "b" * 64
    assert models["pirate@2"].tool_style == "hermes" and models["pirate@2"].defaults == {"temperature": 0.2}
    assert models["pirate@1"].price == FOR_PIRATE and models["base"].price == FOR_ALL
    assert {each.currency for each in models.values()} == {"USD"}
    assert (await models_of(database, other))["pirate"].price == FOR_ALL


async def test_without_a_rate_card_no_price_is_made_up(database: Database) -> None:
    models = await models_of(database, await tenant_with_pirate(database, "harbor"))
    assert models["pirate"].price is None and models["base"].price is None


def test_every_field_is_bounded_as_a_request_is() -> None:
    fields = parameter_fields(FIRST + FURTHER)
    assert [each.name for each in fields] == [*FIRST, *FURTHER]
    for field in fields:
        for bound in (field.low, field.high):
            # `top_p` alone must be above its bound.
            value = int(bound) if field.whole else bound or field.step
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], field.name: value}
            assert getattr(read_parameters("chat", body), field.name) == value
        assert field.step > 0
