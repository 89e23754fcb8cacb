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
    LIMIT_COLUMNS,
    AdmissionEpoch,
    Gateway,
    Quota,
    QuotaEvent,
    ReservationRow,
)
from loraplex.tenants.models.records import AuditEntry, IdempotencyRecord
from loraplex.tenants.models.usage import (
    LEVELS,
    NO_ID,
    OUTCOMES,
    RequestPhases,
    RequestRollup,
    UsageRecord,
    UsageRollup,
    UsageTotal,
)
from loraplex.tenants.models.webhooks import (
    DELIVERY_STATES,
    EVENT_TYPES,
    METERS,
    MeterExport,
    OutboxEvent,
    WebhookDelivery,
    WebhookEndpoint,
)

__all__ = [
    "DELIVERY_STATES",
    "ENVIRONMENTS",
    "EVENT_TYPES",
    "LEVELS",
    "LIMIT_COLUMNS",
    "METERS",
    "NO_ID",
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
    "MeterExport",
    "OutboxEvent",
    "PriceEpoch",
    "PriceVersion",
    "Quota",
    "QuotaEvent",
    "RateCard",
    "RequestPhases",
    "RequestRollup",
    "ReservationRow",
    "Tenant",
    "TenantBilling",
    "Upload",
    "UploadPart",
    "UsageRecord",
    "UsageRollup",
    "UsageTotal",
    "WebhookDelivery",
    "WebhookEndpoint",
]
