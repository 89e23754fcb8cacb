"""Weights that an engine refuses stop serving, in every version of theirs, for their tenant alone."""

from uuid import UUID, uuid4

from tests.adapters.versions.lifecycle_server import Server, actions, namespace_of, server, tenant_id
from tests.tenants.registry_records import RegistryWriter

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database

__all__ = ["server", "tenant_id"]


async def test_quarantine_reaches_every_version_of_the_weights(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    ready = await server.version(await server.begin(tenant_id))
    again = await server.version(await server.begin(tenant_id))
    assert ready.digest is not None and ready.digest == again.digest
    assert await server.lifecycle.quarantine(tenant_id, ready.digest, "three rows were not finite") == 2
    assert await server.lifecycle.quarantine(tenant_id, ready.digest, "again") == 0
    assert await server.lifecycle.quarantine(uuid4(), ready.digest, "another tenant's") == 0
    quarantined = await server.version(ready)
    assert quarantined.state == "quarantined"
    assert [entry for entry in await actions(database, tenant_id) if entry[0] == "version.quarantine"] == [
        ("version.quarantine", "validation")
    ] * 2


async def test_what_an_engine_refuses_is_quarantined_for_its_tenant_alone(
    server: Server, database: Database, tenant_id: UUID
) -> None:
    async with database.as_operator() as session:
        other = (await TenantRepository(session).create("bolt")).id
        await RegistryWriter(session, other).get_or_create("voice")
    mine, theirs = await server.begin(tenant_id), await server.begin(other)
    digest = (await server.version(mine)).digest
    assert digest is not None and digest == (await server.version(theirs)).digest
    server.refused = [(namespace_of(tenant_id), digest), (b"?" * 32, digest), (b"?" * 32, "e" * 64)]
    await server.lifecycle.apply_quarantines()
    assert (await server.version(mine)).state == "quarantined"
    assert (await server.version(theirs)).state == "ready"
