"""Every error of the gateway, and the single table error -> (status, OpenAI `type`, `code`).

GatewayError
├── InvalidParameter          a value that the parameter table does not allow; `param` names the parameter
│   ├── MissingParameter
│   ├── UnknownParameter      a name that is not in the closed table
│   ├── UnsupportedParameter  a known name whose feature this server does not offer
│   ├── UnsupportedTool       a tool that only the host of another API runs
│   ├── LabelsUnreadable      labels of a decision's options that are not tokens of the model
│   └── ContextTooLong        prompt and completion do not fit the model's context
├── InvalidBody               not JSON, not an object, too deep, too many values, not finite
├── BodyTooLarge
├── UnsupportedEncoding       a Content-Encoding other than gzip
├── BodyTimeout               the body arrived too slowly
├── ShareExceeded             a bound that the tenant, or the address, has filled by itself; `limit` names it
├── InsufficientScope
├── FormRefused               a form of the console that this server's own page of the same session has not sent
├── MisdirectedRequest        asked of the console by a name that it is not known by
├── PreconditionRequired      a change without If-Match, which must name the revision that its author has seen
├── AddressNotAllowed         the key may not be used from the address of the request
├── TooManyFailedChecks       the tenant sent too many schemas that were refused
├── TooManyUnknownKeys        the address of the request presented too many keys that do not exist
├── ModelNotFound             base, adapter, alias or version that does not exist for this caller
├── Overloaded                the bounded number of requests in flight is reached
│   └── WorkersUnavailable    no worker process runs a task now: it is down, or too many tasks wait
├── AdapterMismatch           the engine used other weights than the resolved ones: nothing is delivered
├── EngineFailed              a `Failed` event; its engine code selects the row
├── RequestRevoked            it was running when its tenant, its key or its adapter's version was ended
│   ├── TenantStopped
│   ├── KeyRevoked
│   └── VersionDeleted
├── MailNotSent               the mail server did not take a message
└── ClientGone                the client closed the connection

The table also has the errors of the lower layers. An error of any other class is an internal error.
"""

from dataclasses import dataclass, replace
from typing import Final

from loraplex.adapters import errors as adapters_errors
from loraplex.engine import errors as engine_errors
from loraplex.engine.messages import Failed
from loraplex.grammar import errors as grammar_errors
from loraplex.tenants import errors as tenants_errors


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """The client's view of one class of errors. `retry_after_s` is sent as the `Retry-After` header, in whole seconds.

    `repeatable` False: the response asks the client not to send the request again (`x-should-retry: false`).
    """

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    repeatable: bool = True

    @property
    def is_logged(self) -> bool:
        """Whether the error may be a fault of this server: any 500, and a grammar that failed after its compile check."""
        return self.status == 500 or self.code == engine_errors.GrammarFailed.code


class GatewayError(Exception):
    """Base of all errors that a client sees. `param` names the field of the request at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameter(GatewayError):
    """`allowed`: what a value must be, where that is known; never a part of what was sent."""

    allowed: str | None = None


class MissingParameter(InvalidParameter):
    pass


class UnknownParameter(InvalidParameter):
    pass


class UnsupportedParameter(InvalidParameter):
    pass


class UnsupportedTool(InvalidParameter):
    pass


class LabelsUnreadable(InvalidParameter):
    pass


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """Tokens that do not fit together: `prompt` may be less than the true size, when that alone is too much."""

    model: str
    context: int
    prompt: int
    completion: int


class ContextTooLong(InvalidParameter):
    def __init__(self, message: str, param: str, sizes: ContextSizes | None = None) -> None:
        super().__init__(message, param)
        self.sizes = sizes


class InvalidBody(GatewayError):
    pass


class BodyTooLarge(GatewayError):
    pass


class UnsupportedEncoding(GatewayError):
    pass


class BodyTimeout(GatewayError):
    pass


class ShareExceeded(GatewayError):
    """`limit` names the bound, `level` whose it is: the same client is served again when its own work ends."""

    def __init__(self, message: str, *, limit: str, level: str = "tenant") -> None:
        super().__init__(message)
        self.limit = limit
        self.level = level


class InsufficientScope(GatewayError):
    pass


class FormRefused(GatewayError):
    pass


class MisdirectedRequest(GatewayError):
    pass


class PreconditionRequired(GatewayError):
    pass


class AddressNotAllowed(GatewayError):
    pass


class TooManyFailedChecks(GatewayError):
    pass


class TooManyUnknownKeys(GatewayError):
    pass


class ModelNotFound(GatewayError):
    pass


class Overloaded(GatewayError):
    pass


class WorkersUnavailable(Overloaded):
    pass


class AdapterMismatch(GatewayError):
    pass


class EngineFailed(GatewayError):
    """The engine ended the request; an unknown code counts as an internal error."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message, failure.field)
        self.code = failure.code


class RequestRevoked(GatewayError):
    pass


class TenantStopped(RequestRevoked):
    pass


class KeyRevoked(RequestRevoked):
    pass


class VersionDeleted(RequestRevoked):
    pass


class MailNotSent(GatewayError):
    pass


class ClientGone(GatewayError):
    pass


class EngineNotFound(GatewayError):
    pass


class EngineNotAdded(GatewayError):
    pass


class LastEngine(GatewayError):
    """No other engine takes requests."""


_INVALID: Final = "invalid_request_error"
_AUTHENTICATION: Final = "authentication_error"
_PERMISSION: Final = "permission_error"
_SERVER: Final = "server_error"
_RATE: Final = "rate_limit_error"
_QUOTA: Final = "insufficient_quota"

INTERNAL: Final = ErrorRow(500, _SERVER, "internal_error")

ERROR_TABLE: Final[dict[type[Exception], ErrorRow]] = {
    GatewayError: INTERNAL,
    InvalidParameter: ErrorRow(400, _INVALID, "invalid_value"),
    MissingParameter: ErrorRow(400, _INVALID, "missing_required_parameter"),
    UnknownParameter: ErrorRow(400, _INVALID, "unknown_parameter"),
    UnsupportedParameter: ErrorRow(400, _INVALID, "unsupported_parameter"),
    UnsupportedTool: ErrorRow(400, _INVALID, "unsupported_tool"),
    LabelsUnreadable: ErrorRow(400, _INVALID, "labels_unreadable"),
    ContextTooLong: ErrorRow(400, _INVALID, "context_length_exceeded"),
    InvalidBody: ErrorRow(400, _INVALID, "invalid_json"),
    BodyTooLarge: ErrorRow(413, _INVALID, "request_too_large"),
    UnsupportedEncoding: ErrorRow(415, _INVALID, "unsupported_content_encoding"),
    BodyTimeout: ErrorRow(408, _INVALID, "request_timeout"),
    ShareExceeded: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    InsufficientScope: ErrorRow(403, _PERMISSION, "insufficient_scope"),
    FormRefused: ErrorRow(403, _PERMISSION, "form_refused"),
    MisdirectedRequest: ErrorRow(421, _INVALID, "misdirected_request"),
    PreconditionRequired: ErrorRow(428, _INVALID, "precondition_required"),
    AddressNotAllowed: ErrorRow(403, _PERMISSION, "address_not_allowed"),
    TooManyFailedChecks: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    TooManyUnknownKeys: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    ModelNotFound: ErrorRow(404, _INVALID, "model_not_found"),
    Overloaded: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    AdapterMismatch: ErrorRow(500, _SERVER, "adapter_mismatch"),
    TenantStopped: ErrorRow(403, _PERMISSION, "tenant_suspended"),
    KeyRevoked: ErrorRow(401, _AUTHENTICATION, "api_key_revoked"),
    VersionDeleted: ErrorRow(404, _INVALID, "adapter_deleted"),
    MailNotSent: ErrorRow(503, _SERVER, "mail_not_sent", retry_after_s=30),
    ClientGone: ErrorRow(499, _INVALID, "client_closed_request"),
    EngineNotFound: ErrorRow(404, _INVALID, "engine_not_found"),
    EngineNotAdded: ErrorRow(409, _INVALID, "engine_not_added"),
    LastEngine: ErrorRow(409, _INVALID, "last_engine"),
    grammar_errors.GrammarRefused: ErrorRow(400, _INVALID, "invalid_schema"),
    grammar_errors.GrammarTooLarge: ErrorRow(400, _INVALID, "schema_too_large"),
    grammar_errors.GrammarTooCostly: ErrorRow(400, _INVALID, "schema_too_costly"),
    grammar_errors.SchemaNotEnforceable: ErrorRow(400, _INVALID, "unsupported_schema"),
    grammar_errors.AnalysisFailed: ErrorRow(400, _INVALID, "unsupported_schema"),
    grammar_errors.SchemaNotSatisfied: ErrorRow(422, _INVALID, "schema_not_satisfied"),
    adapters_errors.ValidationUnavailable: ErrorRow(503, _SERVER, "overloaded", retry_after_s=30),
    adapters_errors.ValidationShareExceeded: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=30),
    adapters_errors.UploadRefused: ErrorRow(400, _INVALID, "invalid_value"),
    adapters_errors.UploadTooLarge: ErrorRow(413, _INVALID, "request_too_large"),
    adapters_errors.ChecksumMismatch: ErrorRow(400, _INVALID, "checksum_mismatch"),
    adapters_errors.PartsMissing: ErrorRow(409, _INVALID, "parts_missing"),
    adapters_errors.BlobStoreUnavailable: ErrorRow(503, _SERVER, "store_unavailable", retry_after_s=5),
    adapters_errors.StorageFull: ErrorRow(507, _SERVER, "storage_full", retry_after_s=60),
    adapters_errors.BlobMissing: ErrorRow(503, _SERVER, "adapter_unavailable", retry_after_s=5),
    tenants_errors.InvalidApiKey: ErrorRow(401, _AUTHENTICATION, "invalid_api_key"),
    tenants_errors.TenantSuspended: ErrorRow(403, _PERMISSION, "tenant_suspended"),
    tenants_errors.ScopeNotHeld: ErrorRow(403, _PERMISSION, "insufficient_scope"),
    tenants_errors.InvalidField: ErrorRow(400, _INVALID, "invalid_value"),
    tenants_errors.SignInError: ErrorRow(403, _PERMISSION, "sign_in_refused"),
    tenants_errors.SignInSlowed: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    tenants_errors.NotFound: ErrorRow(404, _INVALID, "not_found"),
    tenants_errors.Conflict: ErrorRow(409, _INVALID, "conflict"),
    tenants_errors.AliasMoved: ErrorRow(412, _INVALID, "precondition_failed"),
    tenants_errors.RevisionMoved: ErrorRow(412, _INVALID, "precondition_failed"),
    tenants_errors.CountReached: ErrorRow(409, _INVALID, "limit_reached"),
    tenants_errors.InUse: ErrorRow(409, _INVALID, "in_use"),
    tenants_errors.GateFailed: ErrorRow(409, _INVALID, "gate_failed"),
    tenants_errors.IdempotencyInUse: ErrorRow(409, _INVALID, "idempotency_in_use", retry_after_s=1),
    tenants_errors.IdempotencyMismatch: ErrorRow(422, _INVALID, "idempotency_mismatch"),
    tenants_errors.RateLimited: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    tenants_errors.QuotaExhausted: ErrorRow(429, _QUOTA, "insufficient_quota"),
    tenants_errors.QuotaUnavailable: ErrorRow(503, _SERVER, "quota_unavailable", retry_after_s=2),
    tenants_errors.PolicyStale: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    tenants_errors.PriceMissing: ErrorRow(503, _SERVER, "price_missing", retry_after_s=30, repeatable=False),
    tenants_errors.JournalFull: ErrorRow(507, _SERVER, "storage_full", retry_after_s=60),
    tenants_errors.StoreUnavailable: ErrorRow(503, _SERVER, "store_unavailable", retry_after_s=2),
}

STORES: Final[dict[type[Exception], str]] = {
    tenants_errors.DatabaseUnavailable: "PostgreSQL",
    tenants_errors.ValkeyUnavailable: "Valkey",
    adapters_errors.BlobStoreUnavailable: "The blob store",
}

ENGINE_TABLE: Final[dict[str, ErrorRow]] = {
    engine_errors.InvalidRequest.code: ErrorRow(400, _INVALID, "invalid_value"),
    engine_errors.PromptTooLong.code: ErrorRow(400, _INVALID, "context_length_exceeded"),
    engine_errors.UnsupportedFeature.code: ErrorRow(400, _INVALID, "unsupported_parameter"),
    engine_errors.EngineOverloaded.code: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    engine_errors.QueueShareExceeded.code: ErrorRow(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    engine_errors.EngineUnavailable.code: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    engine_errors.ServerShuttingDown.code: ErrorRow(503, _SERVER, "server_shutting_down", retry_after_s=2),
    engine_errors.EngineDraining.code: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    engine_errors.EngineLost.code: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    engine_errors.PromptQuarantined.code: ErrorRow(503, _SERVER, "engine_unavailable", repeatable=False),
    engine_errors.EngineLostTwice.code: ErrorRow(503, _SERVER, "engine_unavailable", repeatable=False),
    engine_errors.RequestTimeout.code: ErrorRow(504, _SERVER, "timeout"),
    engine_errors.NamespaceForgotten.code: ErrorRow(403, _PERMISSION, "tenant_deleted"),
    engine_errors.NonFiniteLogits.code: ErrorRow(500, _SERVER, "non_finite_logits"),
    engine_errors.NothingAllowed.code: ErrorRow(400, _INVALID, "nothing_allowed"),
    engine_errors.GrammarFailed.code: ErrorRow(400, _INVALID, "grammar_failed"),
    engine_errors.GrammarTooSlow.code: ErrorRow(400, _INVALID, "grammar_too_slow"),
    engine_errors.AdapterError.code: ErrorRow(500, _SERVER, "adapter_error"),
    engine_errors.AdapterLoadFailed.code: ErrorRow(500, _SERVER, "adapter_load_failed"),
    engine_errors.AdapterTooLarge.code: ErrorRow(400, _INVALID, "adapter_too_large"),
    engine_errors.AdapterInexact.code: ErrorRow(400, _INVALID, "adapter_inexact"),
    engine_errors.AdapterQuarantined.code: ErrorRow(503, _SERVER, "adapter_quarantined", retry_after_s=30),
}


@dataclass(frozen=True, slots=True)
class ClientError:
    """The part of an error that a client sees: never the details of a server fault, never why a key was refused. Whoever runs a
    request has a key that was good.
    """

    row: ErrorRow
    message: str
    param: str | None = None
    limit: tuple[str, str] | None = None
    """The bound that its client has filled by itself, and whose it is: the tenant's or the address's."""

    def body(self) -> dict[str, dict[str, str | None]]:
        """Build the OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
        row = self.row
        return {"error": {"message": self.message, "type": row.type, "param": self.param, "code": row.code}}


def describe(error: Exception) -> ClientError:
    """Return the client's view of any exception."""
    row = _row(error)
    if row.status == 401 and not isinstance(error, RequestRevoked):
        return ClientError(row, "The API key is missing, wrong, expired or revoked.")
    if row.status == 500:
        return ClientError(row, f"The server could not complete the request ({row.code}).")
    if isinstance(error, tenants_errors.StoreUnavailable) and not isinstance(
        error, tenants_errors.JournalFull
    ):
        return ClientError(row, "A store that this server depends on does not respond; try again.")
    return ClientError(row, str(error), _param(error), _own_bound(error))


def unavailable_store(error: Exception) -> str | None:
    """Return the name of the store that does not answer; None for every other error."""
    return next((name for cls, name in STORES.items() if isinstance(error, cls)), None)


def _row(error: Exception) -> ErrorRow:
    if isinstance(error, EngineFailed | engine_errors.EngineError):
        return ENGINE_TABLE.get(error.code, INTERNAL)
    row = next((ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE), INTERNAL)
    if isinstance(error, tenants_errors.LimitExceeded) and error.retry_after_s is None:
        return replace(row, retry_after_s=None)
    return row


def _own_bound(error: Exception) -> tuple[str, str] | None:
    if isinstance(error, ShareExceeded):
        return error.limit, error.level
    if isinstance(error, adapters_errors.ValidationShareExceeded):
        return error.limit, "tenant"
    is_queue = (
        isinstance(error, EngineFailed | engine_errors.EngineError)
        and error.code == engine_errors.QueueShareExceeded.code
    )
    return ("waiting_sequences", "tenant") if is_queue else None


def _param(error: Exception) -> str | None:
    if isinstance(error, GatewayError | grammar_errors.GrammarRefused):
        return error.param
    if isinstance(error, adapters_errors.UploadRefused):
        return error.subject
    if isinstance(error, tenants_errors.GateFailed):
        return None if error.evaluation is None else f"evaluations/{error.evaluation}"
    if isinstance(
        error, tenants_errors.InvalidField | tenants_errors.BoundNotHeld | tenants_errors.CountReached
    ):
        return error.field
    return error.field if isinstance(error, engine_errors.InvalidRequest) else None
