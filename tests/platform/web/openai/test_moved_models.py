"""A request runs on what its model name refers to under the policy that admits it, though names are read once per policy epoch."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text as sql
from tests.tenants.admission.gateways import PRICE, SETTINGS
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices
from tests.tenants.registry_records import AliasWriter
from tests.tenants.registry_records import delete as delete_of

from loraplex.adapters.errors import BlobMissing
from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, PolicyStale
from loraplex.tenants.registry.resolution import ModelResolver, ModelTargets
from loraplex.tenants.valkey import open_valkey

CACHED = ServingConfig(key_cache_s=60.0)
ONE: Any = {"model": "pirate", "prompt": [3, 4], "max_tokens": 2}
DIGESTS = {1: "1" * 64, 2: "2" * 64}
DEPRECATED = "UPDATE adapter_versions SET state = 'deprecated' WHERE version = 1"


@asynccontextmanager
async def controller(database: Database, valkey_url: str) -> AsyncIterator[QuotaAdmissionController]:
    redis = open_valkey(valkey_url, command_s=SETTINGS.valkey_s)
    admissions = QuotaAdmissionController(
        database, redis, fixed_prices(PRICE), uuid4(), SETTINGS, journal=MemoryJournal()
    )
    try:
        yield admissions
    finally:
        await admissions.close()
        await redis.aclose()


async def push_versions(gateway: Any) -> UUID:
    """Both versions of `pirate`, of which the first is in production. Returns the tenant."""
    for digest in DIGESTS.values():
        await gateway.adapter("acme", "pirate", digest)
    async with gateway.database.as_operator() as session:
        tenant_id: UUID = (await TenantRepository(session).get("acme")).id
    await change(gateway.database, tenant_id, "move", 1)
    return tenant_id


async def change(database: Database, tenant_id: UUID, what: str, version: int = 2) -> None:
    async with database.as_tenant(tenant_id) as session:
        aliases = AliasWriter(session, tenant_id)
        if what == "move":
            await aliases.set("pirate", "production", {version: 100})
        elif what == "delete alias":
            await aliases.delete("pirate", "production")
        elif what == "deprecate version":
            await session.execute(sql(DEPRECATED))
        else:
            await delete_of(session, tenant_id, "pirate")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each model name was read from the database."""
    counted, find = Counter[str](), ModelResolver.find

    async def counting(resolver: ModelResolver, model: str) -> ModelTargets | None:
        counted[model] += 1
        return await find(resolver, model)

    monkeypatch.setattr(ModelResolver, "find", counting)
    return counted


async def test_a_published_change_is_seen_by_the_next_request(
    start_gateway: Any, database: Database, valkey_url: str, reads: Counter[str]
) -> None:
    async with controller(database, valkey_url) as admissions:
        gateway = await start_gateway(limits=CACHED, admissions=admissions)
        tenant_id = await push_versions(gateway)
        for version in (1, 2, 1):
            await change(database, tenant_id, "move", version)
            await admissions.publish(tenant_id)
            for _ in range(2):
                response = await gateway.post("/v1/completions", ONE)
                assert response.headers["x-loraplex-adapter"] == f"pirate@{version}", response.text
                assert gateway.engine.requests[-1].adapter.digest == DIGESTS[version]
        assert reads == {"pirate": 3}


@pytest.mark.parametrize("what", ["delete alias", "deprecate version", "delete adapter"])
async def test_what_is_gone_does_not_exist_for_the_request_after_its_publication(
    start_gateway: Any, database: Database, valkey_url: str, what: str
) -> None:
    async with controller(database, valkey_url) as admissions:
        gateway = await start_gateway(limits=CACHED, admissions=admissions)
        tenant_id = await push_versions(gateway)
        assert (await gateway.post("/v1/completions", ONE)).status_code == 200
        await change(database, tenant_id, what)
        await admissions.publish(tenant_id)
        response = await gateway.post("/v1/completions", ONE)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert not [name for name in response.headers if "adapter" in name]


async def test_a_name_that_begins_to_exist_is_found_at_once(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=CACHED)
    assert (await gateway.post("/v1/completions", ONE)).status_code == 404
    await push_versions(gateway)
    assert (await gateway.post("/v1/completions", ONE)).status_code == 200


async def test_a_request_that_has_begun_on_the_old_version_begins_again_on_the_new_one(
    start_gateway: Any,
) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.001), limits=CACHED)
    tenant_id = await push_versions(gateway)
    refusals = [PolicyStale("old")]

    async def move_and_refuse() -> None:
        if refusals:
            await change(gateway.database, tenant_id, "move")
            raise refusals.pop()

    gateway.admissions.before_confirmation = move_and_refuse
    response = await gateway.post("/v1/completions", ONE)
    assert response.status_code == 200 and response.headers["x-loraplex-adapter"] == "pirate@2"
    assert [each.digest for each in gateway.admissions.asked] == [*DIGESTS.values()]
    ((reservation, usage),) = gateway.admissions.settled
    assert (reservation.request.digest, usage.completion_tokens) == (DIGESTS[2], 2)
    assert gateway.engine.running == 0 and len(gateway.recorder.timings) == 1


async def test_an_error_of_a_version_that_was_deleted_meanwhile_is_not_reported(start_gateway: Any) -> None:
    """Its files may be gone when the request needs them, while the ledger is about to refuse it."""

    async def without_files(tenant_id: UUID, digest: str) -> str:
        raise BlobMissing(digest)

    gateway = await start_gateway(limits=CACHED, adapter_path=without_files)
    tenant_id = await push_versions(gateway)
    refusals = [PolicyStale("old")]

    async def delete_and_refuse() -> None:
        if refusals:
            await change(gateway.database, tenant_id, "delete adapter")
            raise refusals.pop()

    gateway.admissions.before_confirmation = delete_and_refuse
    response = await gateway.post("/v1/completions", ONE)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert len(gateway.admissions.asked) == 1


async def test_tenants_share_no_names(start_gateway: Any, reads: Counter[str]) -> None:
    gateway = await start_gateway(limits=CACHED)
    other = await gateway.tenant("other")
    await gateway.adapter("acme", "pirate", DIGESTS[1])
    await gateway.adapter("other", "pirate", DIGESTS[2])
    for _ in range(2):
        for key, digest in ((gateway.key, DIGESTS[1]), (other, DIGESTS[2])):
            response = await gateway.post("/v1/completions", ONE, authorization=f"Bearer {key}")
            assert response.headers["x-loraplex-adapter-digest"] == digest
    assert reads == {"pirate": 2}


async def test_without_a_database_a_known_name_is_as_unavailable_as_an_unknown_one(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(limits=CACHED)
    await push_versions(gateway)
    assert (await gateway.post("/v1/completions", ONE)).status_code == 200

    async def fail(resolver: ModelResolver, model: str) -> ModelTargets | None:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(ModelResolver, "find", fail)
    gateway.admissions.refusals = [DatabaseUnavailable("away")]
    for model in ("pirate", "parrot"):
        response = await gateway.post("/v1/completions", ONE | {"model": model})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
