"""Who may know the address of a change."""

from datetime import UTC, datetime
from uuid import uuid4

import pytest

from loraplex.tenants.audit_queries import entry_record
from loraplex.tenants.models import AuditEntry


def entry(**given: str) -> AuditEntry:
    named = {"actor": "a", "action": "key.create", "target": "keys/a"}
    return AuditEntry(id=uuid4(), at=datetime.now(UTC), **named, **given)


@pytest.mark.parametrize("kind", ["key", "operator", "command", "system"])
def test_a_tenant_reads_the_addresses_of_its_own_keys(kind: str) -> None:
    known = entry(actor_kind=kind, address="192.0.2.1")
    assert entry_record(known, to_operator=True).address == "192.0.2.1"
    hidden = entry_record(known, to_operator=False).address
    assert hidden == ("192.0.2.1" if kind == "key" else None)
    assert entry_record(entry(actor_kind=kind), to_operator=True).address is None
