"""Who may know the address of a change."""

import pytest

from loraplex.platform.services.audit import address
from loraplex.tenants.models import AuditEntry


@pytest.mark.parametrize("kind", ["key", "operator", "command", "system"])
def test_a_tenant_reads_the_addresses_of_its_own_keys(kind: str) -> None:
    entry = AuditEntry(actor_kind=kind, address="192.0.2.1")
    assert address(entry, to_operator=True) == "192.0.2.1"
    assert address(entry, to_operator=False) == ("192.0.2.1" if kind == "key" else None)
    assert address(AuditEntry(actor_kind=kind), to_operator=True) is None
