"""The tables (SQLAlchemy 2). Invariant: every row of a tenant carries `tenant_id`, and row-level security is forced on it."""

from loraplex.tenants.canaries.tables import AliasGuard
from loraplex.tenants.engine_minutes.tables import EngineMinuteRow
from loraplex.tenants.evaluations.tables import AliasGate, Evaluation, EvaluationAnswer, Suite
from loraplex.tenants.invoices.tables import CreditEntry, CreditGrant, Invoice, InvoiceLineRow, InvoiceNumber
from loraplex.tenants.models.accounts import ENVIRONMENTS, ApiKey, Tenant
from loraplex.tenants.models.adapters import (
    REASONING_STYLES,
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
from loraplex.tenants.models.billing import PriceEpoch, PriceVersion, RateCard, TenantBilling
from loraplex.tenants.models.installation import Installation
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
    METERS,
    NO_ID,
    OUTCOMES,
    MeterExport,
    MonthlyRollup,
    RequestPhases,
    RequestRollup,
    UsageRecord,
    UsageRollup,
    UsageTotal,
)
from loraplex.tenants.people.tables import (
    Invitation,
    Membership,
    OneTimeLink,
    RecoveryCode,
    SignInThrottle,
    SignUpPlan,
    User,
    UserSession,
)
from loraplex.tenants.recordings.tables import DataPolicy, RecordedRequest
from loraplex.tenants.tables import Base
from loraplex.tenants.webhooks.tables import OutboxEvent, WebhookDelivery, WebhookEndpoint

__all__ = [
    "ENVIRONMENTS",
    "LEVELS",
    "LIMIT_COLUMNS",
    "METERS",
    "NO_ID",
    "OUTCOMES",
    "REASONING_STYLES",
    "TOOL_STYLES",
    "UPLOAD_FILES",
    "UPLOAD_STATES",
    "VERSION_STATES",
    "Adapter",
    "AdapterAlias",
    "AdapterVersion",
    "AdmissionEpoch",
    "AliasGate",
    "AliasGuard",
    "AliasTarget",
    "ApiKey",
    "AuditEntry",
    "Base",
    "CreditEntry",
    "CreditGrant",
    "DataPolicy",
    "EngineMinuteRow",
    "Evaluation",
    "EvaluationAnswer",
    "Gateway",
    "IdempotencyRecord",
    "Installation",
    "Invitation",
    "Invoice",
    "InvoiceLineRow",
    "InvoiceNumber",
    "Membership",
    "MeterExport",
    "MonthlyRollup",
    "OneTimeLink",
    "OutboxEvent",
    "PriceEpoch",
    "PriceVersion",
    "Quota",
    "QuotaEvent",
    "RateCard",
    "RecordedRequest",
    "RecoveryCode",
    "RequestPhases",
    "RequestRollup",
    "ReservationRow",
    "SignInThrottle",
    "SignUpPlan",
    "Suite",
    "Tenant",
    "TenantBilling",
    "Upload",
    "UploadPart",
    "UsageRecord",
    "UsageRollup",
    "UsageTotal",
    "User",
    "UserSession",
    "WebhookDelivery",
    "WebhookEndpoint",
]
