"""Uploads as rows on a real database: room reserved under one lock, parts while open, one end."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.tenants.registry_records import RegistryWriter, add, make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits
from loraplex.tenants.errors import (
    AdapterNotFound,
    CountReached,
    IdempotencyInUse,
    IdempotencyMismatch,
    UploadClaimed,
    UploadEnded,
    UploadNotFound,
)
from loraplex.tenants.models import AdapterVersion, Quota, Upload
from loraplex.tenants.registry.storage_quota import StorageQuota
from loraplex.tenants.registry.uploads import DeclaredFile, ExpiredUploads, UploadRepository, UploadTerms

TERMS = UploadTerms(part_bytes=10, lifetime=timedelta(hours=1), max_open=3)
LEASE = timedelta(minutes=1)
END = datetime.now(UTC) + timedelta(hours=2)
FILES = [
    DeclaredFile("adapter_config.json", 5, "a" * 64),
    DeclaredFile("adapter_model.safetensors", 25, "b" * 64),
]


async def prepare(database: Database, tenant: str = "acme", **limits: int) -> UUID:
    """A tenant with the adapter `support`, which has no version."""
    tenant_id = await make_tenant(database, tenant)
    async with database.as_operator() as session:
        await RegistryWriter(session, tenant_id).get_or_create("support")
        if limits:
            session.add(Quota(tenant_id=tenant_id, **limits))
    return tenant_id


async def begin(database: Database, tenant_id: UUID, terms: UploadTerms = TERMS) -> Upload:
    async with database.as_tenant(tenant_id) as session:
        return await UploadRepository(session, tenant_id).open("support", FILES, terms, "key")


async def put(database: Database, tenant_id: UUID, upload_id: UUID, number: int = 1) -> UUID | None:
    async with database.as_tenant(tenant_id) as session:
        return await UploadRepository(session, tenant_id).record_part(
            upload_id,
            "adapter_model.safetensors",
            number,
            size_bytes=10,
            sha256="c" * 64,
            object_id=uuid4(),
        )


def made(upload: Upload, number: int) -> AdapterVersion:
    """A version of the upload's adapter."""
    return AdapterVersion(adapter_id=upload.adapter_id, version=number)


async def used(database: Database, tenant_id: UUID) -> int:
    async with database.as_tenant(tenant_id) as session:
        return await StorageQuota(session, tenant_id).used()


async def overdue(database: Database) -> None:
    async with database.as_operator() as session:
        await session.execute(text("UPDATE uploads SET expires_at = now() - interval '1 second'"))


async def test_bytes_are_reserved_while_it_is_open(database: Database) -> None:
    tenant_id = await prepare(database, max_adapter_bytes=60)
    first, _ = await begin(database, tenant_id), await begin(database, tenant_id)
    assert await used(database, tenant_id) == 60
    with pytest.raises(CountReached, match="max_adapter_bytes of the tenant is 60: 60 bytes are in use"):
        await begin(database, tenant_id)
    async with database.as_tenant(tenant_id) as session:
        await UploadRepository(session, tenant_id).abort(first.id)
    await begin(database, tenant_id)


async def test_versions_take_room_until_their_files_are_gone(database: Database) -> None:
    tenant_id = await prepare(database)
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        await add(adapters, 1)
        await add(adapters, 2, state="rejected")
        await add(adapters, 3, state="deleting")
    assert await used(database, tenant_id) == 20
    async with database.as_operator() as session:
        await session.execute(
            text("UPDATE adapter_versions SET blob_deleted_at = now() WHERE state = 'deleting'")
        )
    assert await used(database, tenant_id) == 10


async def test_an_adapter_may_have_less_room_than_its_tenant(database: Database) -> None:
    tenant_id = await prepare(database, max_adapter_bytes=1000)
    async with database.as_operator() as session:
        adapter = await RegistryWriter(session, tenant_id).get("support")
        session.add(Quota(tenant_id=tenant_id, adapter_id=adapter.id, max_adapter_bytes=29))
    with pytest.raises(CountReached, match="of the adapter is 29"):
        await begin(database, tenant_id)


async def test_many_at_once_never_take_the_same_room(database: Database) -> None:
    tenant_id = await prepare(database, max_adapter_bytes=5 * 30)
    terms = UploadTerms(part_bytes=10, lifetime=timedelta(hours=1), max_open=100)
    results = await asyncio.gather(
        *(begin(database, tenant_id, terms) for _ in range(10)), return_exceptions=True
    )
    assert sum(isinstance(result, Upload) for result in results) == 5
    assert all(isinstance(result, Upload | CountReached) for result in results)
    assert await used(database, tenant_id) == 150


async def test_a_tenant_has_so_many_open(database: Database) -> None:
    tenant_id, other = await prepare(database), await prepare(database, "other")
    for _ in range(TERMS.max_open):
        await begin(database, tenant_id)
    with pytest.raises(CountReached, match="3 uploads are open"):
        await begin(database, tenant_id)
    await begin(database, other)


async def test_another_tenants_upload_does_not_exist(database: Database) -> None:
    tenant_id, rival = await prepare(database), await make_tenant(database, "rival")
    upload = await begin(database, tenant_id)
    with pytest.raises(AdapterNotFound):
        await begin(database, rival)
    for call, args in (("get", ()), ("require_open", ()), ("abort", ()), ("release", ({None},))):
        async with database.as_tenant(rival) as session:
            with pytest.raises(UploadNotFound):
                await getattr(UploadRepository(session, rival), call)(upload.id, *args)
    with pytest.raises(UploadNotFound):
        await put(database, rival, upload.id)


async def test_a_part_sent_again_replaces_its_object(database: Database) -> None:
    tenant_id = await prepare(database)
    upload = await begin(database, tenant_id)
    assert await put(database, tenant_id, upload.id) is None
    results = await asyncio.gather(*(put(database, tenant_id, upload.id) for _ in range(5)))
    assert len({*results}) == 5 and None not in results
    results = await asyncio.gather(*(put(database, tenant_id, upload.id, 2) for _ in range(5)))
    assert sorted(results, key=str).count(None) == 1
    async with database.as_tenant(tenant_id) as session:
        parts = await UploadRepository(session, tenant_id).parts(upload.id)
    assert [(part.number, part.size_bytes) for part in parts] == [(1, 10), (2, 10)]


async def test_a_claim_keeps_others_out_until_it_ends(database: Database) -> None:
    tenant_id = await prepare(database)
    upload = await begin(database, tenant_id)

    async def call(name: str, *args: object) -> Any:
        async with database.as_tenant(tenant_id) as session:
            return await getattr(UploadRepository(session, tenant_id), name)(upload.id, *args)

    claimed = await call("claim", LEASE)
    for name, args in (("claim", (LEASE,)), ("abort", ()), ("require_open", ())):
        with pytest.raises(UploadClaimed):
            await call(name, *args)
    with pytest.raises(UploadClaimed):
        await put(database, tenant_id, upload.id)
    await overdue(database)
    async with database.as_operator() as session:
        assert await ExpiredUploads(session).expire() == 0
        await session.execute(text("UPDATE uploads SET expires_at = now() + interval '1 hour'"))
    assert await call("release", {claimed.claimed_until})
    lapsed = await call("claim", timedelta(0))
    claimed = await call("claim", LEASE)
    assert not await call("release", {lapsed.claimed_until})
    with pytest.raises(UploadClaimed, match="another request"):
        await call("complete", made(upload, 1), {lapsed.claimed_until})
    with pytest.raises(UploadClaimed, match="another request"):
        await call("renew", {lapsed.claimed_until}, END)
    await call("renew", {lapsed.claimed_until, claimed.claimed_until}, END)
    await call("complete", made(upload, 1), {END})
    with pytest.raises(UploadEnded, match="completed"):
        await call("abort")
    with pytest.raises(UploadEnded):
        await call("complete", made(upload, 2), {END})
    with pytest.raises(UploadEnded):
        await call("renew", {END}, END)


async def test_time_ends_it_even_before_the_janitor(database: Database) -> None:
    tenant_id = await prepare(database)
    upload = await begin(database, tenant_id)
    await put(database, tenant_id, upload.id)
    await overdue(database)
    with pytest.raises(UploadEnded, match="expired"):
        await put(database, tenant_id, upload.id)
    async with database.as_operator() as session:
        janitor = ExpiredUploads(session)
        assert (await janitor.expire(), await janitor.expire()) == (1, 0)
        assert [each.id for each in await janitor.ended_with_parts(10)] == [upload.id]
        await janitor.forget_parts(upload.id)
        assert await janitor.ended_with_parts(10) == []
        assert await janitor.open_among([upload.id]) == set()
        assert await janitor.forget_ended(datetime.now(UTC) - timedelta(days=1)) == 0
        assert await janitor.forget_ended(datetime.now(UTC)) == 1
    assert await used(database, tenant_id) == 0


async def test_a_deleted_adapter_takes_its_uploads_along(database: Database) -> None:
    tenant_id = await prepare(database)
    upload = await begin(database, tenant_id)
    async with database.as_tenant(tenant_id) as session:
        await session.execute(text("UPDATE adapters SET deleted_at = now()"))
    async with database.as_operator() as session:
        assert await ExpiredUploads(session).expire() == 1
    with pytest.raises(UploadEnded):
        await put(database, tenant_id, upload.id)


async def test_an_adapter_of_the_same_name_gets_no_upload_of_the_deleted_one(database: Database) -> None:
    tenant_id, upload_id = await prepare(database), uuid4()
    old = await begin(database, tenant_id)
    async with database.as_tenant(tenant_id) as session:
        first = await UploadRepository(session, tenant_id).reserve_whole(
            "support", 30, TERMS, "key", upload_id=upload_id, lease=LEASE
        )
        assert await UploadRepository(session, tenant_id).release(upload_id, {first.claimed_until})
        await UploadRepository(session, tenant_id).abort(upload_id)
        await session.execute(text("UPDATE adapters SET deleted_at = now()"))
        namesake = await RegistryWriter(session, tenant_id).create("support")
    new = AdapterVersion(adapter_id=namesake.id, version=1)
    with pytest.raises(UploadEnded):
        async with database.as_tenant(tenant_id) as session:
            await UploadRepository(session, tenant_id).complete(old.id, new, {old.claimed_until})
    async with database.as_tenant(tenant_id) as session:
        again = await UploadRepository(session, tenant_id).reserve_whole(
            "support", 30, TERMS, "key", upload_id=upload_id, lease=LEASE
        )
        await UploadRepository(session, tenant_id).complete(upload_id, new, {again.claimed_until})
    assert (again.adapter_id, again.version) == (namesake.id, 1)


async def test_a_whole_upload_is_known_by_its_id(database: Database) -> None:
    tenant_id, upload_id = await prepare(database), uuid4()

    async def reserve() -> Upload:
        async with database.as_tenant(tenant_id) as session:
            return await UploadRepository(session, tenant_id).reserve_whole(
                "support", 40, TERMS, "key", upload_id=upload_id, lease=LEASE
            )

    async def declare(files: list[DeclaredFile], upload: Upload) -> None:
        async with database.as_tenant(tenant_id) as session:
            await UploadRepository(session, tenant_id).declare(upload_id, files, {upload.claimed_until})

    first = await reserve()
    with pytest.raises(IdempotencyInUse):
        await reserve()
    assert await used(database, tenant_id) == 40
    await declare(FILES, first)
    assert await used(database, tenant_id) == 30
    with pytest.raises(IdempotencyMismatch):
        await declare(FILES[:1], first)
    async with database.as_tenant(tenant_id) as session:
        repository = UploadRepository(session, tenant_id)
        assert await repository.release(upload_id, {first.claimed_until})
        await repository.abort(upload_id)
    reopened = await reserve()
    assert reopened.state == "open" and await used(database, tenant_id) == 40
    with pytest.raises(UploadClaimed):
        await declare(FILES, first)
    with pytest.raises(IdempotencyMismatch):
        await declare(FILES[:1], reopened)
    async with database.as_tenant(tenant_id) as session:
        await UploadRepository(session, tenant_id).complete(
            upload_id, made(reopened, 4), {reopened.claimed_until}
        )
    again = await reserve()
    assert (again.state, again.version) == ("completed", 4)


async def test_a_body_that_is_larger_than_its_reservation_needs_room(database: Database) -> None:
    tenant_id, upload_id = await prepare(database, max_adapter_bytes=29), uuid4()
    async with database.as_tenant(tenant_id) as session:
        upload = await UploadRepository(session, tenant_id).reserve_whole(
            "support", 20, TERMS, "key", upload_id=upload_id, lease=LEASE
        )
    with pytest.raises(CountReached, match="20 bytes are in use and 10 more"):
        async with database.as_tenant(tenant_id) as session:
            await UploadRepository(session, tenant_id).declare(upload_id, FILES, {upload.claimed_until})


async def test_a_tenant_without_a_limit_has_the_installations(database: Database) -> None:
    limited = Database(database.url, limits=DefaultLimits(max_adapter_bytes=59))
    for name, own in (("none", {}), ("null", {"max_keys": 1})):
        tenant_id = await prepare(database, name, **own)
        await begin(limited, tenant_id)
        with pytest.raises(CountReached, match="max_adapter_bytes of the tenant is 59"):
            await begin(limited, tenant_id)
    tenant_id = await prepare(database, "own", max_adapter_bytes=60)
    for _ in range(2):
        await begin(limited, tenant_id)
    await limited.close()
