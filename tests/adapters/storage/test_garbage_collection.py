"""Files of deleted versions are removed once no version and no request uses them."""

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import text
from tests.adapters.storage.folder_removal import remove_from
from tests.tenants.registry_records import RegistryWriter, add, digest, make_tenant
from tests.tenants.registry_records import delete as delete_of

from loraplex.adapters.storage.garbage_collection import BlobGarbageCollector, remove_unused
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE, LocalAdapterStore
from loraplex.tenants.database import Database
from loraplex.tenants.registry.unused_blobs import Blob, lock_digest

RESERVE = (
    "INSERT INTO reservations (id, tenant_id, api_key_id, digest, gateway_id, prompt_tokens, completion_tokens, "
    "amount_nano, day, month, expires_at) VALUES (:id, :tenant_id, :id, :digest, :id, 1, 1, 1, "
    "'d:2026-11-21', 'm:2026-11', now())"
)


def store(storage: LocalAdapterStore, tenant_id: UUID, number: int) -> None:
    with storage.staging() as staged:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            (staged / name).write_text("content")
        storage.put(tenant_id, digest(number), staged)


async def make(database: Database, tenant_id: UUID, number: int, name: str = "support") -> None:
    async with database.as_tenant(tenant_id) as session:
        adapters = RegistryWriter(session, tenant_id)
        await adapters.get_or_create(name)
        await adapters.add_version(name, digest=digest(number), size_bytes=1, rank=1, config={}, report={})


async def delete(database: Database, tenant_id: UUID, version: int) -> None:
    async with database.as_tenant(tenant_id) as session:
        await delete_of(session, tenant_id, "support", version)


async def versions(database: Database, tenant_id: UUID) -> list[int]:
    async with database.as_tenant(tenant_id) as session:
        return [record.version for record in await RegistryWriter(session, tenant_id).versions("support")]


async def test_files_are_deleted_in_the_second_round(database: Database, tmp_path: Path) -> None:
    tenant_id, storage = await make_tenant(database), LocalAdapterStore(tmp_path)
    removal = BlobGarbageCollector(database, remove_from(storage))
    for number in (1, 2):
        await make(database, tenant_id, number)
        store(storage, tenant_id, number)
    await delete(database, tenant_id, 1)
    assert await removal.sweep() == 0 and storage.exists(tenant_id, digest(1))
    assert await versions(database, tenant_id) == [1, 2]
    assert await removal.sweep() == 1
    assert not storage.exists(tenant_id, digest(1)) and storage.exists(tenant_id, digest(2))
    assert await versions(database, tenant_id) == [2]
    assert await removal.sweep() == 0


async def test_files_stay_while_a_request_reads_them(database: Database, tmp_path: Path) -> None:
    tenant_id, storage = await make_tenant(database), LocalAdapterStore(tmp_path)
    removal = BlobGarbageCollector(database, remove_from(storage))
    await make(database, tenant_id, 1)
    store(storage, tenant_id, 1)
    await delete(database, tenant_id, 1)
    async with database.as_writer() as session:
        values = {"id": uuid4(), "tenant_id": tenant_id, "digest": digest(1)}
        await session.execute(text(RESERVE), values)
    assert [await removal.sweep() for _ in range(3)] == [0, 0, 0]
    assert storage.exists(tenant_id, digest(1))
    async with database.as_writer() as session:
        await session.execute(text("DELETE FROM reservations"))
    assert await removal.sweep() == 1 and not storage.exists(tenant_id, digest(1))


async def test_files_of_another_version_stay(database: Database, tmp_path: Path) -> None:
    tenant_id, rival = await make_tenant(database), await make_tenant(database, "rival")
    storage = LocalAdapterStore(tmp_path)
    removal = BlobGarbageCollector(database, remove_from(storage))
    for owner in (tenant_id, rival):
        await make(database, owner, 1)
        store(storage, owner, 1)
    await make(database, tenant_id, 1, "other")
    await delete(database, tenant_id, 1)
    await delete(database, rival, 1)
    assert [await removal.sweep() for _ in range(2)] == [0, 1]
    assert storage.exists(tenant_id, digest(1)) and not storage.exists(rival, digest(1))
    assert await versions(database, tenant_id) == []


async def test_a_removal_waits_for_a_transaction_that_stores_the_files_again(
    database: Database, tmp_path: Path
) -> None:
    """A version written under the lock of its digest keeps files that a removal was about to take."""
    tenant_id, storage = await make_tenant(database), LocalAdapterStore(tmp_path)
    blob = Blob(tenant_id, digest(1))
    await make(database, tenant_id, 1)
    store(storage, tenant_id, 1)
    await delete(database, tenant_id, 1)
    async with database.as_tenant(tenant_id) as session:
        await lock_digest(session, blob)
        removing = asyncio.create_task(remove_unused(database, remove_from(storage), blob))
        await asyncio.sleep(0.05)
        assert not removing.done()
        assert (await add(RegistryWriter(session, tenant_id), 1)).version == 2
    assert not await removing
    assert storage.exists(tenant_id, digest(1)) and await versions(database, tenant_id) == [2]
