"""The audit log as pages show it: filters, pages, changes field by field, and what a tenant may not know."""

import json
from datetime import UTC, datetime, timedelta

from tests.tenants.registry_records import make_tenant

from loraplex.platform.web.audit.pages import ChangedField, changed_fields, json_line
from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.database import Database


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
    async with database.as_tenant(tenant_id) as session:
        first = await audit_entries(session, tenant_id, {}, None, 3)
        rest = await audit_entries(session, tenant_id, {}, first[-1].id, 3)
        filters = {"action": "key.create", "actor": "k1"}
        [entry] = await audit_entries(session, tenant_id, filters, None, 3)
        now = datetime.now(UTC)
        assert await audit_entries(session, tenant_id, {}, None, 3, since=now + timedelta(hours=1)) == []
        assert await audit_entries(session, tenant_id, {}, None, 3, until=now - timedelta(hours=1)) == []
    assert [len(first), len(rest)] == [3, 1]
    assert {row.address for row in (*first, *rest) if row.actor == "op"} == {None}
    assert rest[0].address == "192.0.2.1"
    assert changed_fields(first[0]) == [ChangedField("b", "2", "null")]
    assert changed_fields(entry) == [ChangedField("name", None, "<b>"), ChangedField("scopes", None, '["a"]')]
    line = json.loads(json_line(entry))
    assert (line["target"], line["after"]) == ("keys/<b>", {"name": "<b>", "scopes": ["a"]})
    names = "id at actor_kind actor action target address request_id tenant_id before after"
    assert list(line) == names.split() and line["tenant_id"] == str(tenant_id)
    async with database.as_operator() as session:
        every = await audit_entries(session, None, {}, None, 99, to_operator=True)
    assert len(every) == 6 and {row.address for row in every} == {"192.0.2.1"}
