"""What the operator plane shows of a tenant, and how it reads a tenant's id: what is no id is unknown like any other."""

from typing import Any
from uuid import UUID

from loraplex.platform.api.management.responses import ResponseModel, UtcTime
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.models import Tenant


class TenantAccountDocument(ResponseModel):
    """A deleted tenant is shown by its id alone; `erased_at` says when nothing but its numbers was left."""

    id: UUID
    name: str
    tier: str
    weight: float
    created_at: UtcTime
    suspended_at: UtcTime | None
    deleted_at: UtcTime | None
    erased_at: UtcTime | None


class NewTenantDocument(TenantAccountDocument):
    """`api_key`: the tenant's first key (scope `tenant:admin`), shown this once."""

    api_key: str


def fields(tenant: Tenant) -> dict[str, Any]:
    """What a tenant's document says, for it and for the audit log."""
    return {name: getattr(tenant, name) for name in TenantAccountDocument.model_fields}


def tenant_id_of(text: str) -> UUID:
    """Raises `TenantNotFound` for a text that is no UUID in its one usual form."""
    try:
        tenant_id = UUID(text)
    except ValueError:
        tenant_id = None
    if tenant_id is None or str(tenant_id) != text:
        raise TenantNotFound(f"no tenant {text[:40]}")
    return tenant_id
