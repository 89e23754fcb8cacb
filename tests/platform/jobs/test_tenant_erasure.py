"""A deleted tenant is erased from engine, stores and disk; failed or interrupted steps are repeated."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from tests.tenants.registry_records import RegistryWriter

from loraplex.adapters.errors import StorageError
from loraplex.adapters.storage.blob_store import BlobStore
from loraplex.adapters.storage.local_store import LocalAdapterStore
from loraplex.adapters.storage.object_store import ObjectStore
from loraplex.adapters.uploads.parts import UploadParts
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineRequest, Event, Failed
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.jobs import housekeeping as housekeeping_module
from loraplex.platform.jobs.housekeeping import Housekeeping
from loraplex.platform.jobs.tenant_erasure import StoredFiles, TenantErasure
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.partitions import LedgerPartitions, LedgerRetention
from loraplex.tenants.models import Tenant
from loraplex.tenants.retention import Retention
from loraplex.tenants.valkey import open_valkey, tenant_key

DIGEST = "a" * 64
USAGE = (
    "INSERT INTO usage_records (id, tenant_id, api_key_id, outcome, uncached_tokens, cached_tokens,"
    " completion_tokens, currency, amount_pico, day, month, admitted_at) VALUES (gen_random_uuid(), :tenant, :tenant,"
    " 'completed', 5, 0, 7, 'USD', 12, 'd:2026-11-21', 'm:2026-11', now())"
)
RESERVATION = (
    "INSERT INTO reservations (id, tenant_id, api_key_id, gateway_id, prompt_tokens, completion_tokens, amount_nano,"
    " day, month, expires_at) VALUES (gen_random_uuid(), :tenant, :tenant, :tenant, 1, 1, 1, 'd:2026-11-21',"
    " 'm:2026-11', now())"
)


class Flaky(FakeEngine):
    """An engine whose `forget` fails `failures` times."""

    failures = 0

    async def forget(self, namespace: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineUnavailable("the engine is not connected")
        await super().forget(namespace)


@dataclass
class House:
    """The housekeeping of a gateway and the stores that it cleans."""

    database: Database
    valkey: Redis
    engine: Flaky
    storage: LocalAdapterStore
    housekeeping: Housekeeping
    gone: list[UUID] = field(default_factory=list)

    async def tenant(self, name: str) -> UUID:
        """A tenant with an adapter, a key, counters and usage."""
        async with self.database.as_operator() as session:
            tenant_id = (await TenantRepository(session).create(name)).id
            await KeyRepository(session).create(tenant_id, "key", ["inference"])
            adapters = RegistryWriter(session, tenant_id)
            await adapters.get_or_create("support")
            await adapters.add_version("support", digest=DIGEST, size_bytes=1, rank=8, config={}, report={})
        with self.storage.staging() as staged:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                (staged / file).write_bytes(b"x")
            self.storage.put(tenant_id, DIGEST, staged)
        await self.valkey.set(tenant_key(tenant_id, "epoch"), 1)
        async with self.database.as_writer() as session:
            await session.execute(text(USAGE), {"tenant": tenant_id})
        return tenant_id

    async def delete(self, tenant_id: UUID) -> None:
        async with self.database.as_operator() as session:
            await TenantDeletions(session).begin(tenant_id)

    async def erased(self, tenant_id: UUID) -> bool:
        async with self.database.as_operator() as session:
            return (await session.get_one(Tenant, tenant_id)).erased_at is not None

    async def left(self, tenant_id: UUID) -> tuple[int, int, bool, int]:
        """Adapters, keys in Valkey, whether blobs are there, usage rows."""
        async with self.database.as_operator() as session:
            adapters = await RegistryWriter(session, tenant_id).list()
            usage = await session.scalar(
                text("SELECT count(*) FROM usage_records WHERE tenant_id = :id"), {"id": tenant_id}
            )
        keys = [key async for key in self.valkey.scan_iter(tenant_key(tenant_id, "*"))]
        return len(adapters), len(keys), self.storage.exists(tenant_id, DIGEST), usage or 0


def namespace_of(tenant_id: UUID) -> bytes:
    return tenant_id.bytes * 2


@pytest.fixture
async def house(database: Database, valkey_url: str, tmp_path: Path) -> AsyncIterator[House]:
    engine, storage = Flaky(FakeScript(token_interval_s=0.01)), LocalAdapterStore(tmp_path / "adapters")
    valkey = open_valkey(valkey_url)
    erasure = TenantErasure(
        database=database,
        valkey=valkey,
        engine=engine,
        namespace_of=namespace_of,
        files=StoredFiles(BlobStore(storage, None, "b" * 64), UploadParts(ObjectStore(tmp_path / "objects"))),
        settle_s=0.2,
    )
    retention = Retention(audit=timedelta(days=30), quota_events=timedelta(days=30))
    partitions = LedgerPartitions(database.url, LedgerRetention())
    housekeeping = Housekeeping(
        database=database, erasure=erasure, retention=retention, partitions=partitions
    )
    yield House(database, valkey, engine, storage, housekeeping)
    await valkey.aclose()


async def test_all_but_usage_numbers_is_erased_and_other_tenants_stay(house: House) -> None:
    mine, other = await house.tenant("acme"), await house.tenant("rival")
    request = EngineRequest(
        request_id="r",
        namespace=namespace_of(mine),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=3000),
    )

    async def run() -> list[Event]:
        return [event async for event in house.engine.submit(request)]

    running = asyncio.create_task(run())
    await asyncio.sleep(0.05)
    await house.delete(mine)
    await house.housekeeping.finish_deletions()
    last = (await asyncio.wait_for(running, 60))[-1]
    assert isinstance(last, Failed) and last.code == "namespace_forgotten"
    assert await house.erased(mine) and await house.left(mine) == (0, 0, False, 1)
    assert not await house.erased(other) and await house.left(other) == (1, 1, True, 1)
    assert namespace_of(other) not in house.engine.forgotten


async def test_another_gateway_continues_an_interrupted_erasure(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant_id, second = await house.tenant("acme"), await house.tenant("rival")
    await house.delete(tenant_id)
    await house.delete(second)
    house.engine.failures = 1
    await house.housekeeping.finish_deletions()
    # A tenant that cannot be erased now does not delay others.
    assert await house.left(tenant_id) == (1, 1, True, 1) and await house.erased(second)

    def full(tenant_id: UUID) -> None:
        raise StorageError("the disk is read-only")

    with monkeypatch.context() as broken:
        broken.setattr(house.storage, "delete_tenant", full)
        await house.housekeeping.finish_deletions()
    assert await house.left(tenant_id) == (1, 1, True, 1)
    # Rows are gone, and the process dies before the counters are.
    with monkeypatch.context() as broken:
        broken.setattr("loraplex.platform.jobs.tenant_erasure.erase_tenant", None)
        await house.housekeeping.finish_deletions()
    assert not await house.erased(tenant_id) and await house.left(tenant_id) == (0, 1, False, 1)
    await house.housekeeping.finish_deletions()
    assert await house.erased(tenant_id) and await house.left(tenant_id) == (0, 0, False, 1)


async def test_open_requests_are_given_time_to_settle(house: House) -> None:
    tenant_id = await house.tenant("acme")
    async with house.database.as_writer() as session:
        await session.execute(text(RESERVATION), {"tenant": tenant_id})
    await house.delete(tenant_id)
    began = asyncio.get_running_loop().time()
    await house.housekeeping.finish_deletions()
    assert asyncio.get_running_loop().time() - began >= 0.2
    assert await house.erased(tenant_id)


async def test_every_gateway_forgets_a_tenant_once(house: House) -> None:
    tenant_id = await house.tenant("acme")
    await house.delete(tenant_id)
    await house.housekeeping.finish_deletions()
    house.engine.forgotten.clear()
    elsewhere = replace(house.housekeeping, _forgotten=set())
    for _ in range(2):
        await elsewhere.finish_deletions()
    assert house.engine.forgotten == [namespace_of(tenant_id)]


async def test_blobs_of_a_tenant_deleted_elsewhere_are_erased_and_unknown_ones_stay(house: House) -> None:
    mine, other = await house.tenant("acme"), await house.tenant("rival")
    await house.delete(mine)
    unknown = UUID(int=7)
    (house.storage.root / str(unknown)).mkdir()
    await house.housekeeping.remove_leftovers()
    # A tenant that this database does not know may belong to another one.
    assert sorted(house.storage.tenants()) == sorted([other, unknown])


async def test_it_continues_after_an_error(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping_module, "DELETION_POLL_S", 0.01)
    monkeypatch.setattr(housekeeping_module, "SWEEP_S", 0.01)
    tenant_id = await house.tenant("acme")
    await house.delete(tenant_id)
    house.engine.failures = 2
    failures: list[int] = []

    async def defect() -> dict[str, int]:
        failures.append(1)
        raise ValueError("a defect")

    monkeypatch.setattr(Housekeeping, "sweep", lambda self: defect())
    running = asyncio.create_task(house.housekeeping.run())
    async with asyncio.timeout(60):
        while not await house.erased(tenant_id) or len(failures) < 2:
            await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()


async def test_a_sweep_ends_when_nothing_old_is_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping_module, "BATCH", 3)
    old = "INSERT INTO idempotency_records VALUES ('c', :n, NULL, 'POST /', sha256(''), NULL, NULL, now(), now())"
    async with house.database.as_operator() as session:
        await session.execute(text(old), [{"n": str(number)} for number in range(7)])
    assert (await house.housekeeping.sweep())["idempotency_records"] == 7
