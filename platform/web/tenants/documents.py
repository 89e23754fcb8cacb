"""Response schemas of a tenant on the operator plane, and the parser of a tenant id: an invalid id is an unknown tenant."""

from typing import Any
from uuid import UUID

from loraplex.platform.services.tenants import CreatedTenant
from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.models import Tenant
from loraplex.tenants.records import UtcTime


class TenantAccountDocument(ResponseModel):
    """A deleted tenant is found by its id only. `erased_at`: when all of its data except its usage figures was erased."""

    id: UUID
    name: str
    tier: str
    weight: float
    unknown_parameters: str
    created_at: UtcTime
    suspended_at: UtcTime | None
    deleted_at: UtcTime | None
    erased_at: UtcTime | None


class NewTenantDocument(TenantAccountDocument):
    """`api_key`: the tenant's first key (scope `tenant:admin`), returned only here."""

    api_key: str


def to_response(tenant: Tenant) -> TenantAccountDocument:
    return TenantAccountDocument(**_fields(tenant))


def new_tenant_response(created: CreatedTenant) -> NewTenantDocument:
    return NewTenantDocument(**_fields(created.tenant), api_key=created.key.plaintext)


def _fields(tenant: Tenant) -> dict[str, Any]:
    return {name: getattr(tenant, name) for name in TenantAccountDocument.model_fields}
