"""Old records are deleted in bounded batches; recent ones stay."""

import re
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import select, text, update
from tests.tenants.registry_records import make_tenant

from loraplex.tenants import retention
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.engine_minutes.use_cases import keep
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.models import ApiKey, FailedRequest, Quota
from loraplex.tenants.people.console_keys import issue_console_key
from loraplex.tenants.retention import METER_EVENTS, Retention, RetentionRepository
from loraplex.tenants.scopes import INFERENCE
from loraplex.tenants.usage.meter_events import WINDOW

AUDIT = (
    "INSERT INTO audit_entries (id, at, actor_kind, actor, action, target)"
    " VALUES (:id, :at, 'system', 'x', 'x', 'x')"
)
EVENT = (
    "INSERT INTO quota_events (id, tenant_id, level, subject_id, limit_name, period, threshold, used, limit_value,"
    " created_at) VALUES (gen_random_uuid(), :tenant, 'tenant', gen_random_uuid(), 'x', 'm:2026-01', 80, 1, 1, :at)"
)
RECORD = (
    "INSERT INTO idempotency_records (caller, idempotency_key, route, body_sha256, expires_at)"
    " VALUES ('c', CAST(:at AS text), 'POST /', sha256(''), :at)"
)
RECORDED = (
    "INSERT INTO recorded_requests (id, tenant_id, base_digest, content, created_at, expires_at)"
    " VALUES (gen_random_uuid(), :tenant, 'b', '', :at, :at)"
)
POLICY_EPOCH = text("SELECT policy_epoch FROM tenants")
WEBHOOK = "INSERT INTO outbox_events (id, tenant_id, type, subject, data, created_at) VALUES (gen_random_uuid(), :tenant, 'adapter.ready', 'x', '{}', :at)"
FAILED = "INSERT INTO failed_requests VALUES (:tenant, gen_random_uuid(), :at, true, 'r', 'k', NULL, NULL, 'timeout', 504, 'm', 0)"
FILLED = (
    *("audit_entries", "quota_events", "idempotency_records", "recorded_requests", "outbox_events"),
    "failed_requests",
)
OF_PEOPLE = ("sessions", "one_time_links", "invitations", "sign_in_throttles", "users")
USER = "INSERT INTO users (id, email, name, is_operator, created_at, last_seen_at) VALUES (:id, :email, 'x', :op, :at, :seen)"
PERSONAL = (
    "INSERT INTO sessions (id, user_id, token_sha256, expires_at) VALUES (gen_random_uuid(), :id, sha256(:n), :at)",
    """
    INSERT INTO one_time_links (id, user_id, token_sha256, purpose, expires_at)
    VALUES (gen_random_uuid(), :id, sha256(:n), 'reset', :at)
    """,
)
UNBOUND = (
    """
    INSERT INTO invitations (id, purpose, token_sha256, invited_by, expires_at)
    VALUES (gen_random_uuid(), 'operator', sha256(:n), 'x', :at)
    """,
    "INSERT INTO sign_in_throttles (subject, failures, updated_at) VALUES (sha256(:n), 1, :at)",
)
RETENTION = Retention(audit=timedelta(days=30), quota_events=timedelta(days=60))


async def fill(database: Database, days: list[int]) -> None:
    tenant, now = await make_tenant(database), datetime.now(UTC)
    ages = [now - timedelta(days=each) for each in days]
    async with database.as_writer() as session:
        await session.execute(text(EVENT), [{"tenant": tenant, "at": at} for at in ages])
        await session.execute(text(FAILED), [{"tenant": tenant, "at": at} for at in ages])
    async with database.as_operator() as session:
        await session.execute(text(AUDIT), [{"id": uuid7_from(at), "at": at} for at in ages])
        await session.execute(text(RECORD), [{"at": at} for at in ages])
        await session.execute(text("INSERT INTO data_policies VALUES (:tenant)"), {"tenant": tenant})
        await session.execute(text(RECORDED), [{"tenant": tenant, "at": at} for at in ages])
        # Those that the trigger wrote of the events above.
        await session.execute(text("DELETE FROM outbox_events"))
        await session.execute(text(WEBHOOK), [{"tenant": tenant, "at": at} for at in ages])


async def sweep(database: Database, batch: int) -> dict[str, int]:
    async with database.as_operator() as session:
        return await RetentionRepository(session, RETENTION).sweep(batch)


async def test_old_records_are_deleted_and_recent_ones_stay(database: Database) -> None:
    await fill(database, [-1, 1, 29, 31, 59, 61, 365])
    everything = {
        "audit_entries": 4,
        "quota_events": 2,
        "idempotency_records": 6,
        "recorded_requests": 6,
        "failed_requests": 6,
        "outbox_events": 4,
        "meter_exports": 0,
        "evaluations": 0,
        "engine_minutes": 0,
        "api_keys": 0,
        **dict.fromkeys(OF_PEOPLE, 0),
    }
    assert await sweep(database, 100) == everything
    assert await sweep(database, 100) == dict.fromkeys(everything, 0)
    async with database.as_operator() as session:
        left = {name: await session.scalar(text(f"SELECT count(*) FROM {name}")) for name in FILLED}
    assert left == dict(zip(FILLED, (3, 5, 1, 1, 3, 1), strict=True))


async def test_ended_keys_stay_as_long_as_the_audit_log_names_them(database: Database) -> None:
    tenant_id, now = await make_tenant(database), datetime.now(UTC)
    ends = {
        "working": (None, None),
        "expires": (None, now + timedelta(days=1)),
        "revoked-lately": (now - timedelta(days=29), None),
        "expired-lately": (None, now - timedelta(days=29)),
        "revoked": (now - timedelta(days=31), now + timedelta(days=1)),
        "expired": (now, now - timedelta(days=31)),
        "replaced": (now - timedelta(days=31), None),
        "in-grace": (None, now + timedelta(days=1)),
        "successor": (now - timedelta(days=31), None),
    }
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        records = {name: (await keys.create(tenant_id, name, [INFERENCE])).record for name in ends}
        session.add(Quota(tenant_id=tenant_id, api_key_id=records["revoked"].id, tokens_per_day=1))
        for name, (revoked_at, expires_at) in ends.items():
            records[name].revoked_at, records[name].expires_at = revoked_at, expires_at
        records["replaced"].successor = records["working"]
        records["revoked-lately"].successor = records["revoked"]
        records["in-grace"].successor = records["successor"]
        await session.flush()
        epoch = await session.scalar(POLICY_EPOCH)
    assert (await sweep(database, 2))["api_keys"] == 2
    assert (await sweep(database, 2))["api_keys"] == 1
    async with database.as_operator() as session:
        left = {each.name: each.replaced_by for each in await KeyRepository(session).list(tenant_id)}
        limits = await session.scalar(text("SELECT count(*) FROM quotas"))
        # A key that had ended, and its limits, changed no policy.
        assert await session.scalar(POLICY_EPOCH) == epoch
    # A key in its grace period was replaced, also when the key that replaced it has ended long ago.
    kept = dict.fromkeys(("working", "expires", "revoked-lately", "expired-lately", "successor"))
    assert left == kept | {"in-grace": records["successor"].id}
    assert limits == 0


async def test_of_rotated_keys_only_the_root_of_limits_is_kept(database: Database) -> None:
    """What it binds stays below it, and it is known by what it was replaced."""
    tenant_id, now = await make_tenant(database), datetime.now(UTC)
    rows = {}
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        for name, limit in (("free", None), ("limited", 5)):
            first = (await keys.create(tenant_id, name, [INFERENCE])).record
            session.add(Quota(tenant_id=tenant_id, api_key_id=first.id, tokens_per_day=limit))
            await session.flush()
            rows[name] = [first]
            for _ in range(4):
                rows[name].append((await keys.rotate(tenant_id, rows[name][-1].key_id)).record)
            minted = await keys.create(tenant_id, name, [INFERENCE], parent=rows[name][2])
            rows[name].append(minted.record)
        ended = {"revoked_at": now - timedelta(days=31)}
        await session.execute(update(ApiKey).where(ApiKey.revoked_at.is_not(None)).values(ended))
    assert (await sweep(database, 3))["api_keys"] == 3
    assert (await sweep(database, 100))["api_keys"] == 4
    async with database.as_operator() as session:
        left = {each.id: each for each in await KeyRepository(session).list(tenant_id)}
    root, newest, minted_key = (rows["limited"][place].id for place in (0, 4, 5))
    assert {*left} == {root, newest, minted_key, rows["free"][4].id, rows["free"][5].id}
    assert left[root].replaced_by == newest
    for id, key in left.items():
        below = id in (newest, minted_key)
        assert (key.parent_id, key.limit_root) == (
            root if below else None,
            root if below or id == root else None,
        )


async def test_a_key_whose_use_counts_for_its_group_is_kept_in_its_month(database: Database) -> None:
    tenant_id, now = await make_tenant(database), datetime(2026, 11, 20, tzinfo=UTC)
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        root = (await keys.create(tenant_id, "root", [INFERENCE])).record
        session.add(Quota(tenant_id=tenant_id, api_key_id=root.id, tokens_per_month=5))
        await session.flush()
        for name, month in (("this", 11), ("before", 10)):
            child = (await keys.create(tenant_id, name, [INFERENCE], parent=root)).record
            child.revoked_at = datetime(2026, month, 3, tzinfo=UTC)
        await session.flush()
        retention = Retention(audit=timedelta(days=2), quota_events=timedelta(days=2))
        assert (await RetentionRepository(session, retention, now).sweep(100))["api_keys"] == 1
        assert {*await session.scalars(select(ApiKey.name))} == {"root", "this"}


async def test_a_key_of_the_consoles_pages_is_kept_a_day_unless_usage_names_it(database: Database) -> None:
    tenant_id, now = await make_tenant(database), datetime.now(UTC)
    async with database.as_operator() as session:
        for name, ended in (("day", 25), ("hours", 23), ("used", 25), ("billed", 25)):
            ends = now - timedelta(hours=ended)
            await issue_console_key(session, tenant_id, name, [INFERENCE], "ada@example.com", ends)
    async with database.as_writer() as session:
        await session.execute(text("UPDATE api_keys SET last_used_at = now() WHERE name = 'used'"))
    with psycopg.connect(database.url) as connection:
        connection.execute(
            "INSERT INTO usage_rollups SELECT tenant_id, date_trunc('hour', now()), gen_random_uuid(), id, gen_random_uuid(),"
            " 'EUR', 1, 1, 0, 1, 1 FROM api_keys WHERE name = 'billed'"
        )
    assert (await sweep(database, 100))["api_keys"] == 1
    async with database.as_operator() as session:
        assert {*await session.scalars(select(ApiKey.name))} == {"hours", "used", "billed"}


async def test_a_tenant_keeps_its_newest_failed_requests(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_FAILED_REQUESTS", 2)
    tenants, now = [await make_tenant(database), await make_tenant(database, "other")], datetime.now(UTC)
    insert = text(FAILED.replace("gen_random_uuid()", ":id"))
    ids = [uuid7_from(now - timedelta(minutes=each)) for each in range(6)]
    async with database.as_writer() as session:
        for tenant, number in zip(tenants, (6, 2), strict=True):
            rows = [{"tenant": tenant, "id": id, "at": now} for id in ids[:number]]
            await session.execute(insert, rows)
    assert [(await sweep(database, 3))["failed_requests"] for _ in range(3)] == [3, 1, 0]
    async with database.as_operator() as session:
        left = await session.scalars(select(FailedRequest.id).where(FailedRequest.tenant_id == tenants[0]))
        assert {*left} == {*ids[:2]}


async def test_a_batch_is_bounded_and_one_sweeps_at_a_time(database: Database) -> None:
    await fill(database, [100 + day for day in range(10)])
    async with database.as_operator() as one, database.as_operator() as two:
        first = await RetentionRepository(one, RETENTION).sweep(6)
        second = await RetentionRepository(two, RETENTION).sweep(6)
    others = dict.fromkeys(("meter_exports", "api_keys", "engine_minutes", "evaluations", *OF_PEOPLE), 0)
    assert first == {**dict.fromkeys(FILLED, 6), **others} and set(second.values()) == {0}
    assert await sweep(database, 6) == {**dict.fromkeys(FILLED, 4), **others}


async def test_exported_meter_events_are_kept_longer_than_hours_are_compared(database: Database) -> None:
    tenant, now = await make_tenant(database), datetime.now(UTC)
    insert = text(
        "INSERT INTO meter_exports (tenant_id, hour, meter, sequence, value, sent_at)"
        " VALUES (:tenant, :hour, 'prompt', 1, 1, :sent_at)"
    )
    async with database.as_operator() as session:
        for days, sent_at in ((61, now), (62, None), (WINDOW.days + 1, now)):
            values = {"tenant": tenant, "hour": now - timedelta(days=days), "sent_at": sent_at}
            await session.execute(insert, values)
    assert (await sweep(database, 100))["meter_exports"] == 1
    assert METER_EVENTS > WINDOW


async def test_what_people_leave_is_deleted_after_its_end(database: Database) -> None:
    tenant_id, now = await make_tenant(database), datetime.now(UTC)
    old, recent = now - timedelta(days=31), now - timedelta(days=29)
    people = {
        "member": (False, old, old),
        "operator": (True, old, None),
        "seen": (False, old, recent),
        "new": (False, recent, None),
        "gone": (False, old, old),
        "never-seen": (False, old, None),
    }
    ids = {name: uuid4() for name in people}
    rows = [{"n": bytes([days]), "at": now - timedelta(days=days - 1)} for days in (0, 2, 30, 32)]
    with psycopg.connect(database.url, autocommit=True) as owner:
        for name, (is_operator, at, seen) in people.items():
            given = {
                "id": ids[name],
                "email": f"{name}@example.com",
                "op": is_operator,
                "at": at,
                "seen": seen,
            }
            owner.execute(re.sub(r":(\w+)", r"%(\1)s", USER).encode(), given)
        for statement in (*PERSONAL, *UNBOUND):
            for row in rows:
                owner.execute(
                    re.sub(r":(\w+)", r"%(\1)s", statement).encode(), {**row, "id": ids["operator"]}
                )
        owner.execute(
            "INSERT INTO memberships (tenant_id, user_id, role) VALUES (%s, %s, 'viewer')",
            (tenant_id, ids["member"]),
        )
    swept = await sweep(database, 100)
    assert {name: swept[name] for name in OF_PEOPLE} == {
        "sessions": 3,
        "one_time_links": 1,
        "invitations": 1,
        "sign_in_throttles": 1,
        "users": 2,
    }
    async with database.as_operator() as session:
        left = set(await session.scalars(text("SELECT email FROM users")))
    assert left == {f"{name}@example.com" for name in ("member", "operator", "seen", "new")}


async def test_minutes_of_engines_stay_a_week(database: Database) -> None:
    counts = {name: 0 for name, field in EngineMinute.model_fields.items() if field.annotation is int}
    async with database.as_operator() as session:
        for days in (6, 8):
            at = datetime.now(UTC) - timedelta(days=days)
            own = {"minute": at, "gateway": uuid4(), "host": "h", "address": ""}
            await keep(session, [EngineMinute.model_validate(counts | own)])
    assert (await sweep(database, 100))["engine_minutes"] == 1
