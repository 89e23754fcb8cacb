"""The audit log only grows, contains no secret, and is listed newest first."""

from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, ProgrammingError
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.actors import Actor
from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.audit_log import REMOVED, SECRET_FIELDS, AuditRepository, changed
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.database import Database

KEY = Actor("key", "abc", "203.0.113.9", "r-1")


async def entries(database: Database, tenant_id: UUID, **filters: str) -> list[OperatorAuditDocument]:
    async with database.as_tenant(tenant_id) as session:
        return [*await audit_entries(session, tenant_id, filters, None, 100)]


async def test_entries_are_listed_newest_first(database: Database) -> None:
    tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
    for number in range(4):
        async with database.as_tenant(tenant_id) as session:
            audit = AuditRepository(session, KEY, tenant_id)
            await audit.record(
                "thing.change", f"things/{number % 2}", {"a": 1, "b": 2}, {"a": 1, "b": number}
            )
            assert audit.tenants == {tenant_id}
    found = await entries(database, tenant_id)
    assert [entry.after for entry in found] == [{"b": 3}, {}, {"b": 1}, {"b": 0}]
    assert (found[0].actor_kind, found[0].actor, str(found[0].address), found[0].request_id) == (
        *("key", "abc"),
        *("203.0.113.9", "r-1"),
    )
    assert len(await entries(database, tenant_id, target="things/1")) == 2
    assert await entries(database, tenant_id, actor="other") == [] == await entries(database, other)
    async with database.as_tenant(tenant_id) as session:
        rest = await audit_entries(session, tenant_id, {}, found[1].id, 100)
    assert [entry.id for entry in rest] == [entry.id for entry in found[2:]]


async def test_an_operator_writes_into_a_tenants_log(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        audit = AuditRepository(session, Actor("operator", "op", "::1"), None)
        await audit.record("price.change", "rate-cards/1")
        await audit.record("tenant.suspend", "tenants/acme", tenant_id=tenant_id)
        assert audit.tenants == {tenant_id}
        assert [e.action for e in await audit_entries(session, None, {}, None, 9)] == [
            "tenant.suspend",
            "price.change",
        ]
    assert [entry.action for entry in await entries(database, tenant_id)] == ["tenant.suspend"]


async def test_it_only_grows(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        await AuditRepository(session, KEY, tenant_id).record("thing.create", "things/1")
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with database.as_operator() as session:
            await session.execute(text("UPDATE audit_entries SET actor = 'x'"))
    with pytest.raises(IntegrityError, match="only grows"):
        async with database.as_operator() as session:
            await session.execute(text("DELETE FROM audit_entries"))


async def test_an_address_is_one_or_none(database: Database) -> None:
    tenant_id = await make_tenant(database)
    addresses = (None, "", "unix:", "10.0.0.1; DROP", "fe80::1%eth0")
    async with database.as_tenant(tenant_id) as session:
        for address in addresses:
            await AuditRepository(session, Actor("key", "abc", address), tenant_id).record("a.b", "c")
    kept = [str(entry.address) for entry in await entries(database, tenant_id)]
    assert sorted(kept) == ["None"] * 4 + ["fe80::1"]


async def test_no_secret_is_kept(database: Database) -> None:
    tenant_id = await make_tenant(database)
    key = generate_key("live").plaintext
    canary = {name: "the canary" for name in SECRET_FIELDS}
    inside = {"name": f"my key {key}", "nested": [{"list": {"Secret": "the canary"}}, key[:40]]}
    async with database.as_tenant(tenant_id) as session:
        audit = AuditRepository(session, KEY, tenant_id)
        await audit.record(
            "thing.change", f"things/{key}", canary, {**canary, **inside, "api_key": "the canary too"}
        )
    (entry,) = await entries(database, tenant_id)
    written = f"{entry.target} {entry.before} {entry.after}"
    assert REMOVED in written and "the canary" not in written and key[:20] not in written


def test_values_become_json() -> None:
    identity, now = uuid4(), datetime(2026, 11, 21, tzinfo=UTC)
    before, after = changed(
        None, {"id": identity, "at": now, "scopes": {"b", "a"}, "limit": None, "weights": {3: 90}}
    )
    assert before is None
    assert after == {
        "id": str(identity),
        "at": "2026-11-21T00:00:00+00:00",
        "scopes": ["a", "b"],
        "limit": None,
        "weights": {"3": 90},
    }
