"""The schema under an owner who is no superuser and inherits nothing of the roles it may take: forced security binds it too."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from decimal import Decimal

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import select, text
from sqlalchemy.exc import DataError
from tests.tenants.registry_records import RegistryWriter, add, make_tenant, set_state

from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS
from loraplex.platform.datastores.migrations import downgrade, upgrade
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.api_keys.keys import AuthenticatedKey, KeyRepository
from loraplex.tenants.database import ROLES, Database
from loraplex.tenants.models import MonthlyRollup, UsageRecord, UsageRollup

pytestmark = pytest.mark.parametrize("postgres_major", POSTGRES_MAJORS, indirect=True)
OWNER = "ordinary_owner"
PARTS = """
    INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'early');
    INSERT INTO adapters (id, tenant_id, name) SELECT gen_random_uuid(), id, 'support' FROM tenants;
    INSERT INTO uploads (id, tenant_id, adapter_id, files, size_bytes, part_size, state, expires_at)
        SELECT gen_random_uuid(), tenant_id, id, '[]', 1, 1, 'open', now() FROM adapters;
    INSERT INTO upload_parts (upload_id, file, number, tenant_id, size_bytes, sha256)
        SELECT id, 'adapter_config.json', 1, tenant_id, 1, repeat('a', 64) FROM uploads;
    INSERT INTO usage_records (request_id, tenant_id, api_key_id, outcome, prompt_tokens, cached_tokens, completion_tokens,
        amount_pico, day, month, admitted_at)
        SELECT id, id, id, 'completed', 5, 2, 7, 12, 'd:2026-11-21', 'm:2026-11', now() FROM tenants;
"""

CROSSED = """
    INSERT INTO quota_events (id, tenant_id, level, subject_id, limit_name, period, threshold, used, limit_value)
    VALUES (gen_random_uuid(), :tenant, 'tenant', :tenant, 'tokens_per_day', 'd:2026-11-21', 80, 4, 5)
"""


@pytest.fixture
async def owned(empty_database_url: str, database_template: str) -> AsyncIterator[Database]:
    """A database that its ordinary owner migrated, and that had rows on the way. The cluster's roles exist already."""
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        owner = sql.Identifier(OWNER)
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN NOSUPERUSER NOINHERIT PASSWORD {}").format(
                owner, sql.Literal(OWNER)
            )
        )
        connection.execute(
            sql.SQL("GRANT {} TO {}").format(sql.SQL(", ").join(map(sql.Identifier, ROLES)), owner)
        )
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(name, owner))
        login = empty_database_url.split("//")[1].split("@")[0]
        url = empty_database_url.replace(login, f"{OWNER}:{OWNER}")
        upgrade(url, "0008")
        connection.execute(PARTS)
        upgrade(url)
        database = Database(url)
        yield database
        await database.close()
        connection.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(owner))
        connection.execute(sql.SQL("DROP OWNED BY {}").format(owner))
        connection.execute(sql.SQL("DROP ROLE {}").format(owner))


async def test_what_crosses_tenants_works_for_an_ordinary_owner(owned: Database) -> None:
    await owned.check_roles()
    tenant_id = await make_tenant(owned)
    async with owned.as_tenant(tenant_id) as session:
        key_id = (await KeyRepository(session).create(tenant_id, "first", ["inference"])).record.key_id

    async def find() -> AuthenticatedKey | None:
        async with owned.as_writer() as session:
            return await KeyRepository(session).find(key_id)

    before = await find()
    async with owned.as_tenant(tenant_id) as session:
        await KeyRepository(session).revoke(tenant_id, key_id)
    after = await find()
    assert before is not None and after is not None and after.revoked_at is not None
    assert (before.policy_epoch, after.policy_epoch) == (1, 2)
    async with owned.as_operator() as session:
        deletions = TenantDeletions(session)
        await deletions.begin(tenant_id)
        assert await deletions.erase_rows(tenant_id, 1000) and await deletions.finish(tenant_id)
    assert await find() is None


async def test_usage_of_before_is_copied_by_an_ordinary_owner(owned: Database) -> None:
    """Also back: forced security hides the rows from an owner without a policy."""
    rollup = select(UsageRollup.requests, UsageRollup.uncached_tokens, UsageRollup.amount_pico)
    async with owned.as_operator() as session:
        assert (await session.execute(rollup)).all() == [(1, 3, Decimal(12))]
        month = select(MonthlyRollup.uncached_tokens, MonthlyRollup.amount_pico)
        assert (await session.execute(month)).all() == [(3, Decimal(12))]
        assert (await session.execute(select(UsageRecord.cached_tokens))).all() == [(2,)]
    await asyncio.to_thread(downgrade, owned.url, "0012")
    async with owned.as_operator() as session:
        found = await session.execute(text("SELECT prompt_tokens, amount_pico FROM usage_records"))
        assert found.all() == [(5, 12)]
    await asyncio.to_thread(upgrade, owned.url)


async def test_partitions_are_made_and_dropped_for_an_ordinary_owner(owned: Database) -> None:
    add = text("SELECT add_usage_partition(:parent, CAST(:at AS timestamptz))")
    drop = text("SELECT drop_usage_partition(:parent, :keep)")
    at = datetime(2020, 2, 29, 23, 59, tzinfo=UTC)
    async with owned.as_operator() as session:
        for parent, name in (("usage_records", "2020_02"), ("request_phases", "2020_02_29")):
            assert await session.scalar(add, {"parent": parent, "at": at}) == f"{parent}_{name}"
            assert await session.scalar(add, {"parent": parent, "at": at}) is None
            assert await session.scalar(drop, {"parent": parent, "keep": 2}) == f"{parent}_{name}"
            assert await session.scalar(drop, {"parent": parent, "keep": 2}) is None
    for parent, keep in (("usage_records", 1), ("request_phases", 0), ("tenants", 24)):
        with pytest.raises(DataError, match="not dropped"):
            async with owned.as_operator() as session:
                await session.scalar(drop, {"parent": parent, "keep": keep})


async def test_triggers_report_events_for_an_ordinary_owner(owned: Database) -> None:
    tenant_id = await make_tenant(owned)
    async with owned.as_tenant(tenant_id) as session:
        await add(RegistryWriter(session, tenant_id), 1, state="validating")
        await set_state(session, "ready")
    async with owned.as_writer() as session:
        await session.execute(text(CROSSED), {"tenant": tenant_id})
    async with owned.as_operator() as session:
        found = await session.execute(
            text("SELECT type, data ->> 'adapter' FROM outbox_events ORDER BY type")
        )
        assert found.all() == [("adapter.ready", "support"), ("quota.threshold", None)]
