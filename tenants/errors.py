"""Every error the tenants package raises. Nothing here knows HTTP.

TenantsError
├── InvalidField             a value is not allowed: names the field and what is allowed
│   ├── InvalidName          a tenant, key, adapter or alias name
│   └── InvalidScope         an unknown scope, or one this kind of key cannot have
├── InvalidApiKey            the key does not authenticate
│   ├── MalformedKey         not the key format, or the checksum shows a typo
│   ├── UnknownKey           no such key, or the secret is wrong
│   ├── RevokedKey
│   └── ExpiredKey
├── TenantSuspended          the key is good but its tenant is suspended
├── ScopeNotHeld             a key would grant, or manage a key with, a scope that it does not have itself
│   └── BoundNotHeld         a key would grant networks, a time or a limit that it does not have itself: names the field
├── SignInError              the person is not signed in
│   ├── SignInRefused        the account, the password or the code is wrong, or the account may not enter
│   ├── SecondFactorNeeded   the password is right; a code is needed, too
│   └── SignInSlowed         too many failures: says when the next try is possible
├── NotFound                 it does not exist within this tenant
│   ├── TenantNotFound
│   ├── KeyNotFound
│   ├── AdapterNotFound
│   ├── VersionNotFound
│   ├── AliasNotFound
│   ├── CalibrationNotFound  the version has no calibration under the served base model
│   ├── UploadNotFound
│   ├── InvoiceNotFound
│   ├── RefusalNotFound      no limit refused a request of this id recently
│   ├── RequestNotFound      the ledger has no request of this id
│   ├── PhasesNotFound       the phases of a request are not stored, or not any more
│   ├── WebhookNotFound
│   ├── DeliveryNotFound     the endpoint has no such delivery
│   ├── SuiteNotFound
│   ├── EvaluationNotFound   no such evaluation, or it has no report
│   ├── GateNotFound
│   ├── UserNotFound         no such person or invitation
│   └── LinkNotValid         the one-time link was used, has expired, or never was
├── Conflict                 the present state forbids the change
│   ├── NameTaken
│   ├── VersionNotReady
│   ├── VersionStateChanged  the version is in a state that forbids the move
│   ├── ProfileFixed         the version has had an alias
│   ├── AliasMoved           the alias is not where the caller saw it
│   ├── NoPreviousVersion
│   ├── RevisionMoved        the row is not as the caller saw it
│   ├── CountReached         the tenant has as many as its quota allows: names the limit
│   ├── InUse                an alias points to it, requests run on it, or it has not been validated yet
│   ├── IdempotencyInUse     the first request with this Idempotency-Key is still running
│   ├── StoredResponseUnreadable  the stored response was encrypted with another server secret
│   ├── KeyEnded             the key is revoked or expired: nothing of it may change
│   ├── UploadEnded          it was completed, aborted, or has expired
│   ├── EvaluationEnded      there is nothing to cancel
│   ├── GateFailed           the gate of an alias refuses a version: names the report
│   ├── ContentUnreadable    a suite or report was encrypted with another server secret
│   ├── UploadClaimed        its parts are being assembled
│   ├── DeliveryPending      it has not ended, so there is nothing to repeat
│   ├── WebhookSecretUnreadable  the secret was encrypted with another server secret
│   ├── MonthNotOver         an invoice becomes final only after its month
│   ├── NothingToBill        the month has no usage, no adjustments and no minimum
│   ├── InvoiceStateForbids  the invoice is in a state that forbids the step
│   ├── UsageIncomplete      the ledger's rows do not add up to the invoice: some are deleted
│   ├── AlreadyCorrected     the usage of the request was taken back before
│   ├── ReplayTooSlow        there are too many requests to replay limits over them
│   ├── AlreadyMember        the person is a member of the tenant
│   ├── InvitationPending    the person has not accepted yet: there is no role to change
│   ├── LastAdmin            the tenant would be without an admin
│   ├── ResetForbidden       the person's account is not this tenant's alone
│   ├── SecondFactorState    the second factor is in a state that forbids the step
│   └── SignUpClosed         no plan is published
├── IdempotencyMismatch      the Idempotency-Key was used for another request
├── PolicyStale              the caller was read before its tenant, key or limits changed: read it again
├── PriceMissing             no rate card covers the request in its tenant's currency
├── LimitExceeded            a limit forbids the request: names it and its level
│   ├── RateLimited          trying again later helps
│   └── QuotaExhausted       nothing helps before the period ends or the limit is raised
├── RoleUnsafe               row-level security would not bind the server: it must not start
└── StoreUnavailable         a store is down, overloaded or too slow; the caller may try again
    ├── DatabaseUnavailable
    ├── ValkeyUnavailable
    ├── CountersNewer        a gateway of a newer release counts for this tenant: this one may not touch its counters
    ├── JournalFull          this gateway's journal has no room for another request: nothing of it was written
    ├── JournalUnavailable   this gateway's journal cannot be written or read now
    │   └── JournalUnreadable  the file is damaged, or written by another release
    └── QuotaUnavailable     what is left of a limit is unknown now: names it and its level
"""

from uuid import UUID

from loraplex.tenants.rate_state import RateState


class TenantsError(Exception):
    """Base of all errors of this package."""


class InvalidField(TenantsError):
    """`field` names the value that is not allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class InvalidName(InvalidField):
    pass


class InvalidScope(InvalidField):
    def __init__(self, message: str) -> None:
        super().__init__("scopes", message)


class InvalidApiKey(TenantsError):
    """The presented key does not authenticate; subclasses say why, for logs rather than for the caller."""


class MalformedKey(InvalidApiKey):
    pass


class UnknownKey(InvalidApiKey):
    pass


class RevokedKey(InvalidApiKey):
    pass


class ExpiredKey(InvalidApiKey):
    pass


class TenantSuspended(TenantsError):
    pass


class ScopeNotHeld(TenantsError):
    pass


class BoundNotHeld(ScopeNotHeld):
    """`field` is `allowed_cidrs`, `expires_at` or the name of a limit."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class SignInError(TenantsError):
    pass


class SignInRefused(SignInError):
    pass


class SecondFactorNeeded(SignInError):
    pass


class SignInSlowed(SignInError):
    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"too many failed sign-ins: try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class NotFound(TenantsError):
    pass


class TenantNotFound(NotFound):
    pass


class KeyNotFound(NotFound):
    pass


class AdapterNotFound(NotFound):
    pass


class VersionNotFound(NotFound):
    pass


class AliasNotFound(NotFound):
    pass


class CalibrationNotFound(NotFound):
    pass


class UploadNotFound(NotFound):
    pass


class SuiteNotFound(NotFound):
    pass


class EvaluationNotFound(NotFound):
    pass


class GateNotFound(NotFound):
    pass


class InvoiceNotFound(NotFound):
    pass


class RefusalNotFound(NotFound):
    pass


class RequestNotFound(NotFound):
    pass


class PhasesNotFound(NotFound):
    pass


class WebhookNotFound(NotFound):
    pass


class DeliveryNotFound(NotFound):
    pass


class UserNotFound(NotFound):
    pass


class LinkNotValid(NotFound):
    pass


class Conflict(TenantsError):
    pass


class NameTaken(Conflict):
    pass


class VersionNotReady(Conflict):
    pass


class VersionStateChanged(Conflict):
    pass


class ProfileFixed(Conflict):
    pass


class AliasMoved(Conflict):
    pass


class NoPreviousVersion(Conflict):
    pass


class RevisionMoved(Conflict):
    pass


class CountReached(Conflict):
    """`limit` is `max_keys`, `max_adapters`, `max_adapter_bytes`, `max_webhooks`, `max_invitations`, `max_suites` or `max_evaluations`.

    `field`: of the request.
    """

    def __init__(self, limit: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.field = field


class InUse(Conflict):
    pass


class UploadEnded(Conflict):
    pass


class EvaluationEnded(Conflict):
    pass


class ContentUnreadable(Conflict):
    pass


class GateFailed(Conflict):
    """`evaluation`: the report on `version` that does not keep the gate; None where there is no report."""

    def __init__(self, message: str, evaluation: UUID | None, version: int) -> None:
        super().__init__(message)
        self.evaluation, self.version = evaluation, version


class UploadClaimed(Conflict):
    pass


class MonthNotOver(Conflict):
    pass


class NothingToBill(Conflict):
    pass


class InvoiceStateForbids(Conflict):
    pass


class UsageIncomplete(Conflict):
    pass


class IdempotencyInUse(Conflict):
    pass


class StoredResponseUnreadable(Conflict):
    pass


class DeliveryPending(Conflict):
    pass


class WebhookSecretUnreadable(Conflict):
    pass


class ReplayTooSlow(Conflict):
    pass


class AlreadyCorrected(Conflict):
    pass


class AlreadyMember(Conflict):
    pass


class InvitationPending(Conflict):
    pass


class LastAdmin(Conflict):
    pass


class ResetForbidden(Conflict):
    pass


class SecondFactorState(Conflict):
    pass


class SignUpClosed(Conflict):
    pass


class IdempotencyMismatch(TenantsError):
    pass


class KeyEnded(Conflict):
    pass


class PolicyStale(TenantsError):
    pass


class PriceMissing(TenantsError):
    pass


class LimitExceeded(TenantsError):
    """`limit` is the limit's name, `level` is tenant, key or adapter. `retry_after_s` None: waiting does not help.

    `rate`: the current rates, None if unknown. `degraded`: refused by a gateway's share, without the counters.
    """

    def __init__(
        self,
        message: str,
        *,
        limit: str,
        level: str,
        limit_value: int,
        retry_after_s: float | None,
        rate: RateState | None = None,
        degraded: bool = False,
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.level = level
        self.limit_value = limit_value
        self.retry_after_s = retry_after_s
        self.rate = rate
        self.degraded = degraded


class RateLimited(LimitExceeded):
    pass


class QuotaExhausted(LimitExceeded):
    pass


class RoleUnsafe(TenantsError):
    pass


class StoreUnavailable(TenantsError):
    pass


class DatabaseUnavailable(StoreUnavailable):
    pass


class ValkeyUnavailable(StoreUnavailable):
    pass


class CountersNewer(StoreUnavailable):
    pass


class JournalFull(StoreUnavailable):
    pass


class JournalUnavailable(StoreUnavailable):
    pass


class JournalUnreadable(JournalUnavailable):
    pass


class QuotaUnavailable(StoreUnavailable):
    """`limit` and `level`: a limit whose remainder is unknown; None if the cause is not a limit."""

    def __init__(self, message: str, *, limit: str | None = None, level: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit
        self.level = level
