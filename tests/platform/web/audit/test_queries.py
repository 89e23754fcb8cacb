"""The audit log as pages show it: filters, pages, changes field by field, and what a tenant may not know."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.platform.web.audit import queries as audit
from loraplex.platform.web.audit.queries import AuditFilter, ChangedField
from loraplex.tenants.audit_log import Actor, AuditRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField


async def test_entries_are_filtered_paged_and_compared_field_by_field(database: Database) -> None:
    tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
    async with database.as_operator() as session:
        for owner, kind, name in (
            (tenant_id, "key", "k1"),
            (tenant_id, "operator", "op"),
            (other, "key", "k2"),
        ):
            log = AuditRepository(session, Actor(kind, name, "192.0.2.1", "r"), None)  # type: ignore[arg-type]
            await log.record(
                "key.create", "keys/<b>", None, {"name": "<b>", "scopes": ["a"]}, tenant_id=owner
            )
            await log.record("key.change", "keys/x", {"a": 1, "b": 2}, {"a": 1, "b": None}, tenant_id=owner)
    mine = AuditFilter(tenant_id=tenant_id)
    async with database.as_tenant(tenant_id) as session:
        first = await audit.entries(session, mine, None, 3)
        rest = await audit.entries(session, mine, str(first.older), 3)
        created = await audit.entries(
            session, AuditFilter(tenant_id=tenant_id, equal={"action": "key.create", "actor": "k1"}), None, 3
        )
        now = datetime.now(UTC)
        since = AuditFilter(tenant_id=tenant_id, since=now + timedelta(hours=1))
        until = AuditFilter(tenant_id=tenant_id, until=now - timedelta(hours=1))
        assert (await audit.entries(session, since, None, 3)).rows == ()
        assert (await audit.entries(session, until, None, 3)).rows == ()
        with pytest.raises(InvalidField):
            await audit.entries(session, mine, "1 OR 1", 3)
    assert [len(first.rows), len(rest.rows), rest.older] == [3, 1, None]
    assert {row.address for row in (*first.rows, *rest.rows) if row.actor == "op"} == {None}
    assert rest.rows[0].address == "192.0.2.1"
    assert first.rows[0].changes == (ChangedField("b", "2", "null"),)
    (entry,) = created.rows
    assert entry.changes == (ChangedField("name", None, "<b>"), ChangedField("scopes", None, '["a"]'))
    line = json.loads(audit.json_line(entry))
    assert (line["target"], line["after"]) == ("keys/<b>", {"name": "<b>", "scopes": ["a"]})
    async with database.as_operator() as session:
        every = await audit.entries(session, AuditFilter(tenant_id=None), None, 99)
    assert len(every.rows) == 6 and {row.address for row in every.rows} == {"192.0.2.1"}
