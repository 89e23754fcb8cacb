"""Deleting a tenant: at once for its keys, in steps for its rows, and never for its numbers."""

from typing import LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import select
from tests.tenants.listing_part import Part
from tests.tenants.registry_records import AliasWriter, RegistryWriter, add, make_tenant

from loraplex.tenants.accounts.deletion import ERASED_TABLES, KEPT_TABLES, TenantDeletions
from loraplex.tenants.accounts.queries import tenants as tenant_list
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.models import Base, Tenant

# In the order of their references; `%(tenant)s` is the tenant.
RESERVATION = """
    INSERT INTO reservations (id, tenant_id, api_key_id, gateway_id, prompt_tokens, completion_tokens, amount_nano, day,
        month, expires_at)
    VALUES (gen_random_uuid(), %(tenant)s, %(tenant)s, %(tenant)s, 1, 1, 1, 'd:2026-11-21', 'm:2026-11', now());
"""
ROWS = """
    INSERT INTO quotas (id, tenant_id, tokens_per_day) VALUES (gen_random_uuid(), %(tenant)s, 5);
    INSERT INTO quotas (id, tenant_id, api_key_id, tokens_per_day)
        SELECT gen_random_uuid(), %(tenant)s, id, 5 FROM api_keys WHERE tenant_id = %(tenant)s LIMIT 1;
    INSERT INTO alias_guards (adapter_id, alias, tenant_id, generation, baseline, canary, canary_weight, max_unsatisfied, min_requests)
        SELECT adapter_id, alias, tenant_id, generation, 1, 2, 10, 0.1, 100 FROM adapter_aliases WHERE tenant_id = %(tenant)s;
    INSERT INTO alias_gates (adapter_id, alias, tenant_id, suite, suite_sha256, min_pass, changed_by)
        SELECT adapter_id, alias, tenant_id, 'conformance', repeat('a', 64), 1, 'k' FROM adapter_aliases
        WHERE tenant_id = %(tenant)s;
    INSERT INTO suites (id, tenant_id, name, sha256, cases, size_bytes, content, created_by)
        VALUES (%(tenant)s, %(tenant)s, 'support', repeat('a', 64), 1, 1, '', 'k');
    INSERT INTO evaluations (id, tenant_id, adapter_id, version, suite, suite_id, suite_sha256, profile, seed, total, key_id, created_by)
        SELECT id, tenant_id, id, 1, 'support', tenant_id, repeat('a', 64), '{}', 0, 1, 'k', 'k' FROM adapters
        WHERE tenant_id = %(tenant)s;
    INSERT INTO evaluation_answers (evaluation_id, side, place, tenant_id, result)
        SELECT id, side, 0, tenant_id, '' FROM evaluations, generate_series(0, 1) AS side WHERE tenant_id = %(tenant)s;
    INSERT INTO decision_calibrations
        VALUES (%(tenant)s, repeat('a', 64), 'f', '1', 'labels', '{}', '{}', repeat('a', 64), now());
    INSERT INTO data_policies VALUES (%(tenant)s);
    INSERT INTO recorded_requests (id, tenant_id, base_digest, content, created_at, expires_at)
        SELECT gen_random_uuid(), %(tenant)s, 'b', '', now(), now() FROM generate_series(1, 3);
    INSERT INTO uploads (id, tenant_id, adapter_id, files, size_bytes, part_size, state, expires_at)
        SELECT gen_random_uuid(), %(tenant)s, id, '[]', 1, 1, 'open', now() FROM adapters WHERE tenant_id = %(tenant)s;
    INSERT INTO upload_parts (upload_id, file, number, tenant_id, size_bytes, sha256, object_id)
        SELECT id, 'adapter_config.json', 1, %(tenant)s, 1, repeat('a', 64), id FROM uploads WHERE tenant_id = %(tenant)s;
    INSERT INTO quota_events (id, tenant_id, level, subject_id, limit_name, period, threshold, used, limit_value)
        VALUES (gen_random_uuid(), %(tenant)s, 'tenant', %(tenant)s, 'tokens_per_day', 'd:2026-11-21', 80, 4, 5);
    INSERT INTO idempotency_records (caller, idempotency_key, tenant_id, route, body_sha256, expires_at)
        VALUES (%(tenant)s::text, 'k', %(tenant)s, 'POST /', sha256(''), now());
    INSERT INTO audit_entries (id, tenant_id, actor_kind, actor, action, target)
        VALUES (gen_random_uuid(), %(tenant)s, 'key', 'k', 'key.create', 'keys/k');
    INSERT INTO admission_epochs VALUES (%(tenant)s, 1);
    INSERT INTO usage_records (id, tenant_id, api_key_id, outcome, uncached_tokens, cached_tokens,
        completion_tokens, currency, amount_pico, day, month, admitted_at)
    VALUES (gen_random_uuid(), %(tenant)s, %(tenant)s, 'completed', 5, 0, 7, 'USD', 12, 'd:2026-11-21', 'm:2026-11', now());
    INSERT INTO usage_rollups
        VALUES (%(tenant)s, '2026-11-21T10:00Z', %(tenant)s, %(tenant)s, %(tenant)s, 'USD', 1, 5, 0, 7, 12);
    INSERT INTO request_rollups VALUES (%(tenant)s, '2026-11-21T10:00Z', %(tenant)s, %(tenant)s, 'completed', 1,
        array_fill(0, ARRAY[16]), array_fill(0, ARRAY[16]));
    INSERT INTO request_phases VALUES (gen_random_uuid(), %(tenant)s, '{"queue": [0, 5]}');
    INSERT INTO failed_requests
        SELECT %(tenant)s, gen_random_uuid(), now(), true, 'r', 'k', NULL, NULL, 'timeout', 504, 'm', 0 FROM generate_series(1, 2);
    INSERT INTO usage_totals VALUES (%(tenant)s, 'tenant', %(tenant)s, 'd:2026-11-21', 1, 12, 1);
    INSERT INTO users (id, email, name) VALUES (%(tenant)s, %(tenant)s || '@example.com', 'Mara');
    INSERT INTO memberships (tenant_id, user_id, role) VALUES (%(tenant)s, %(tenant)s, 'admin');
    INSERT INTO invitations (id, tenant_id, purpose, email, role, token_sha256, invited_by, expires_at)
        VALUES (%(tenant)s, %(tenant)s, 'member', 'b@example.com', 'viewer', sha256(%(tenant)s::text::bytea), 'k', now());
    INSERT INTO sessions (id, token_sha256, user_id, tenant_id, expires_at)
        SELECT gen_random_uuid(), sha256((%(tenant)s || n::text)::bytea), %(tenant)s, %(tenant)s, now()
        FROM generate_series(1, 2) AS n;
    INSERT INTO webhook_endpoints (id, tenant_id, url, events, sealed_secret)
        SELECT gen_random_uuid(), %(tenant)s, 'https://example.com', ARRAY['adapter.ready'], '' FROM generate_series(1, 2);
    INSERT INTO webhook_deliveries (tenant_id, event_id, endpoint_id, attempts_left, expires_at)
        SELECT %(tenant)s, v.id, e.id, 1, now() FROM outbox_events v, webhook_endpoints e
        WHERE v.tenant_id = %(tenant)s AND e.tenant_id = %(tenant)s LIMIT 1;
    INSERT INTO meter_exports (tenant_id, hour, meter, sequence, value)
        VALUES (%(tenant)s, '2026-11-21T10:00Z', 'prompt', 1, 5);
    INSERT INTO rate_cards (scope, tenant_id, currency) VALUES ('tenant', %(tenant)s, 'USD');
    INSERT INTO tenant_billing (tenant_id, currency) VALUES (%(tenant)s, 'USD');
"""
BILLS = """
    INSERT INTO rate_cards (scope, tenant_id, currency) VALUES ('tenant', %(tenant)s, 'USD') ON CONFLICT DO NOTHING;
    INSERT INTO tenant_billing (tenant_id) VALUES (%(tenant)s) ON CONFLICT DO NOTHING;
    INSERT INTO credit_grants (id, tenant_id, currency, amount_micro, priority, reason)
        VALUES (%(tenant)s, %(tenant)s, 'USD', 5, 50, 'welcome');
    INSERT INTO invoices (id, tenant_id, month, currency, attempt, state, grace_ends_at)
        VALUES (%(tenant)s, %(tenant)s, '2026-10', 'USD', 0, 'draft', now());
    INSERT INTO invoice_lines
        (invoice_id, position, tenant_id, kind, month, tokens, amount_pico, amount_micro, billed_tokens, billed_pico)
    VALUES (%(tenant)s, 0, %(tenant)s, 'minimum', '2026-10', 0, 5000000, 5, 0, 0);
    INSERT INTO credit_entries (tenant_id, transaction_id, grant_id, account, amount_micro)
        SELECT %(tenant)s, %(tenant)s, %(tenant)s, a, m FROM (VALUES ('issued', -5), ('available', 5)) v (a, m);
"""


def execute(database: Database, statements: LiteralString, tenant_id: UUID) -> None:
    """As the database's owner, whom no security binds."""
    with psycopg.connect(database.url) as connection:
        psycopg.ClientCursor(connection).execute(statements, {"tenant": tenant_id})


async def fill(database: Database, name: str) -> UUID:
    """A tenant with rows in every table."""
    tenant_id = await make_tenant(database, name)
    async with database.as_tenant(tenant_id) as session:
        adapters, keys = RegistryWriter(session, tenant_id), KeyRepository(session)
        for number in (1, 2, 3):
            await add(adapters, number)
        await AliasWriter(session, tenant_id).set("support", "production", {1: 90, 2: 10})
        first = await keys.create(tenant_id, "first", ["inference"])
        await keys.rotate(tenant_id, first.record.key_id)
    execute(database, ROWS + RESERVATION + BILLS, tenant_id)
    return tenant_id


async def rows_of(database: Database, tenant_id: UUID) -> set[str]:
    """The tables that hold a row of the tenant."""
    found = set()
    async with database.as_operator() as session:
        for table in Base.metadata.sorted_tables:
            if "tenant_id" in table.c:
                query = select(table.c.tenant_id).where(table.c.tenant_id == tenant_id).limit(1)
                found |= {table.name} if (await session.execute(query)).first() else set()
    return found


def test_every_table_of_tenants_is_erased_or_kept() -> None:
    erased = {table.__tablename__ for table in ERASED_TABLES}
    with_tenants = {table.name for table in Base.metadata.sorted_tables if "tenant_id" in table.c}
    assert erased | KEPT_TABLES == with_tenants and not erased & KEPT_TABLES


async def test_all_but_the_numbers_goes_and_other_tenants_stay(database: Database) -> None:
    mine, other = await fill(database, "acme"), await fill(database, "rival")
    async with database.as_operator() as session:
        await TenantDeletions(session).begin(mine)
        with pytest.raises(TenantNotFound):
            await TenantDeletions(session).erase_rows(other, 1000)
    # Small batches, each a transaction of its own: as if the process died after every one.
    steps = 0
    while True:
        async with database.as_operator() as session:
            deletions = TenantDeletions(session)
            assert await deletions.unfinished(10) == [mine]
            assert not await deletions.finish(mine)
            steps += 1
            if await deletions.erase_rows(mine, 3):
                break
    assert steps > 5
    async with database.as_operator() as session:
        assert await TenantDeletions(session).finish(mine)
    async with database.as_operator() as session:
        deletions = TenantDeletions(session)
        assert await deletions.unfinished(10) == []
        tenant = await session.get_one(Tenant, mine)
        assert tenant.name == "acme" and None not in (
            tenant.deleted_at,
            tenant.suspended_at,
            tenant.erased_at,
        )
        erased_at = tenant.erased_at
        assert await deletions.finish(mine) and tenant.erased_at == erased_at
        assert await deletions.deleted_among({mine, other, uuid4()}) == {mine}
    assert await rows_of(database, mine) == KEPT_TABLES
    assert await rows_of(database, other) >= {table.__tablename__ for table in ERASED_TABLES}


async def test_it_ends_at_once_and_frees_its_name(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        key = (await KeyRepository(session).create(tenant_id, "key", ["inference"])).record.key_id
    async with database.as_operator() as session:
        begun = (await TenantDeletions(session).begin(tenant_id)).deleted_at
    async with database.as_operator() as session:
        assert (await TenantDeletions(session).begin(tenant_id)).deleted_at == begun
        assert await KeyRepository(session).find(key) is None
        tenants = TenantRepository(session)
        with pytest.raises(TenantNotFound):
            await tenants.get("acme")
        with pytest.raises(TenantNotFound):
            await tenants.living(tenant_id)
        assert await tenants.list() == [] and await tenant_list(session, Part(None, 10)) == []
        assert (await tenants.by_id(tenant_id)).deleted_at == begun
        assert (await tenants.create("acme")).id != tenant_id
        with pytest.raises(TenantNotFound):
            await TenantDeletions(session).begin(uuid4())


async def test_a_row_that_comes_late_keeps_it_unfinished(database: Database) -> None:
    tenant_id = await fill(database, "acme")
    async with database.as_operator() as session:
        await TenantDeletions(session).begin(tenant_id)
        assert await TenantDeletions(session).open_requests(tenant_id) == 1
        assert await TenantDeletions(session).erase_rows(tenant_id, 1000)
        assert await TenantDeletions(session).open_requests(tenant_id) == 0
    execute(database, RESERVATION, tenant_id)
    async with database.as_operator() as session:
        assert not await TenantDeletions(session).finish(tenant_id)
        assert await TenantDeletions(session).unfinished(10) == [tenant_id]
