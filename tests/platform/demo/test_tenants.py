"""The demo's tenants on a real PostgreSQL: created once, kept, repaired."""

import stat
from pathlib import Path

import msgspec
import pytest
from tests.platform.demo.prepared import CONSOLE, prepare

from loraplex.adapters.push import FolderPush
from loraplex.platform.demo.announcement import announcement
from loraplex.platform.demo.demo_file import DEMO_FILE, read_demo_file
from loraplex.platform.demo.errors import TenantIsNotTheDemos
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import LinkNotValid, RevokedKey
from loraplex.tenants.people.sessions import Client
from loraplex.tenants.people.sign_in import use_link
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.resolution import ModelResolver

NAMES = {"harbor": "pirate", "ledger": "records", "acme": "support"}


async def scopes_of(database: Database, text: str) -> tuple[str | None, list[str]]:
    async with database.as_operator() as session:
        key = await KeyRepository(session).authenticate(text)
        return key.tenant_name, key.scopes


async def test_three_tenants_with_their_own_keys_and_adapters(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    access = await prepare(database, push, tmp_path)
    assert {tenant.name: tenant.adapters for tenant in access.tenants} == {
        name: (adapter,) for name, adapter in NAMES.items()
    }
    assert await scopes_of(database, access.operator_key) == (None, ["operator"])
    for tenant in access.tenants:
        assert await scopes_of(database, tenant.api_key) == (tenant.name, ["inference"])
        assert await scopes_of(database, tenant.admin_key) == (tenant.name, ["tenant:admin"])
        async with database.as_operator() as session:
            tenant_id = (await TenantRepository(session).get(tenant.name)).id
            adapters = AdapterRepository(session, tenant_id)
            assert [adapter.name for adapter in await adapters.list()] == [NAMES[tenant.name]]
            resolved = await ModelResolver(session, tenant_id).resolve(NAMES[tenant.name])
            assert resolved is not None and (resolved.version, resolved.alias) == (1, "production")


async def test_the_file_is_private_and_holds_what_the_contract_names(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    access = await prepare(database, push, tmp_path)
    assert stat.S_IMODE((tmp_path / DEMO_FILE).stat().st_mode) == 0o600
    assert read_demo_file(tmp_path) == access
    root, _, token = (access.console_url or "").partition("/console/sign-in?token=")
    assert (
        root == CONSOLE
        and (await use_link(database, token, Client(None, None))).session.tenant_name == "harbor"
    )
    with pytest.raises(LinkNotValid):
        await use_link(database, token, Client(None, None))
    assert access.base_url == "http://127.0.0.1:8000"
    text = announcement(access, tmp_path / DEMO_FILE)
    assert all(tenant.api_key in text for tenant in access.tenants)
    assert access.operator_key not in text and str(access.console_url) in text


async def test_a_restart_changes_nothing(database: Database, push: FolderPush, tmp_path: Path) -> None:
    first = await prepare(database, push, tmp_path)
    again = await prepare(database, push, tmp_path)
    assert again.console_url != first.console_url
    assert msgspec.structs.replace(again, console_url=first.console_url) == first
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).get("harbor")
        assert len(await AdapterRepository(session, tenant.id).versions("pirate")) == 1
        assert len(await KeyRepository(session).list(tenant.id)) == 3


@pytest.mark.parametrize("damage", ["lost", "damaged"])
async def test_without_the_file_every_key_is_rotated(
    database: Database, push: FolderPush, tmp_path: Path, damage: str
) -> None:
    first = await prepare(database, push, tmp_path)
    if damage == "lost":
        (tmp_path / DEMO_FILE).unlink()
    else:
        (tmp_path / DEMO_FILE).write_text('{"base_url": "http')
    second = await prepare(database, push, tmp_path)
    old = [first.operator_key, *(key for t in first.tenants for key in (t.api_key, t.admin_key))]
    new = [second.operator_key, *(key for t in second.tenants for key in (t.api_key, t.admin_key))]
    assert not set(old) & set(new)
    for text in old:
        with pytest.raises(RevokedKey):
            await scopes_of(database, text)
    for text in new:
        await scopes_of(database, text)


async def test_only_a_key_that_no_longer_works_is_replaced(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    first = await prepare(database, push, tmp_path)
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        revoked = await keys.authenticate(first.tenants[0].api_key)
        await keys.revoke(revoked.tenant_id, revoked.key_id)
    second = await prepare(database, push, tmp_path)
    assert second.tenants[0].api_key != first.tenants[0].api_key
    assert second.tenants[0].admin_key == first.tenants[0].admin_key
    assert second.tenants[1:] == first.tenants[1:]


async def test_a_file_cannot_pass_off_another_tenants_key(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    first = await prepare(database, push, tmp_path)
    harbor, ledger = first.tenants[:2]
    file = tmp_path / DEMO_FILE
    file.write_text(file.read_text().replace(harbor.api_key, ledger.api_key))
    second = await prepare(database, push, tmp_path)
    assert (await scopes_of(database, second.tenants[0].api_key))[0] == "harbor"


async def test_a_foreign_tenant_of_that_name_is_left_alone(
    database: Database, push: FolderPush, tmp_path: Path
) -> None:
    async with database.as_operator() as session:
        foreign = await TenantRepository(session).create("ledger")
        await KeyRepository(session).create(foreign.id, "their own", ["inference"])
    with pytest.raises(TenantIsNotTheDemos, match="'ledger'"):
        await prepare(database, push, tmp_path)
    async with database.as_operator() as session:
        assert [tenant.name for tenant in await TenantRepository(session).list()] == ["ledger"]
        assert len(await KeyRepository(session).list(foreign.id)) == 1
    assert not (tmp_path / DEMO_FILE).exists()
