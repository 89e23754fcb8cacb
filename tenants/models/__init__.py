"""The tables (SQLAlchemy 2). Invariant: every row of a tenant carries `tenant_id`, and row-level security is forced on it."""

from loraplex.tenants.models.accounts import ENVIRONMENTS, ApiKey, Tenant
from loraplex.tenants.models.adapters import (
    TOOL_STYLES,
    UPLOAD_FILES,
    UPLOAD_STATES,
    VERSION_STATES,
    Adapter,
    AdapterAlias,
    AdapterVersion,
    AliasTarget,
    Upload,
    UploadPart,
)
from loraplex.tenants.models.base import Base
from loraplex.tenants.models.billing import PriceEpoch, PriceVersion, RateCard, TenantBilling
from loraplex.tenants.models.quotas import (
    LEVELS,
    LIMIT_COLUMNS,
    OUTCOMES,
    AdmissionEpoch,
    Gateway,
    Quota,
    QuotaEvent,
    ReservationRow,
    UsageRecord,
    UsageTotal,
)
from loraplex.tenants.models.records import AuditEntry, IdempotencyRecord

__all__ = [
    "ENVIRONMENTS",
    "LEVELS",
    "LIMIT_COLUMNS",
    "OUTCOMES",
    "TOOL_STYLES",
    "UPLOAD_FILES",
    "UPLOAD_STATES",
    "VERSION_STATES",
    "Adapter",
    "AdapterAlias",
    "AdapterVersion",
    "AdmissionEpoch",
    "AliasTarget",
    "ApiKey",
    "AuditEntry",
    "Base",
    "Gateway",
    "IdempotencyRecord",
    "PriceEpoch",
    "PriceVersion",
    "Quota",
    "QuotaEvent",
    "RateCard",
    "ReservationRow",
    "Tenant",
    "TenantBilling",
    "Upload",
    "UploadPart",
    "UsageRecord",
    "UsageTotal",
]
