"""Every error of the gateway, and the single table error -> (status, OpenAI `type`, `code`).

GatewayError
├── InvalidParameter          a value outside what the parameter table allows: names the parameter
│   ├── MissingParameter
│   ├── UnknownParameter      a name that the closed table does not hold
│   ├── UnsupportedParameter  a known name whose feature this server does not offer
│   └── ContextTooLong        prompt and completion do not fit the model's context
├── InvalidBody               not JSON, not an object, too deep, too many values, not finite
├── BodyTooLarge
├── InvalidApiKey             malformed, unknown, wrong, expired or revoked: one message for all
├── InsufficientScope
├── TenantSuspended
├── ModelNotFound             base, adapter, alias or version that does not exist for this caller
├── Overloaded                the bounded number of requests in flight is reached
├── DatabaseUnavailable       a dependency that is down is never the caller's fault
├── AdapterMismatch           the engine used other weights than those resolved: nothing is delivered
└── EngineFailed              a `Failed` event; its engine code selects the row
"""

from dataclasses import dataclass
from typing import Final

from loraplex.engine import errors as engine_errors
from loraplex.engine.messages import Failed


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one error looks to a client. `retry_after_s` goes out as the `Retry-After` header, in whole seconds."""

    status: int
    type: str
    code: str
    retry_after_s: int | None = None


class GatewayError(Exception):
    """Base of all errors a client sees. `param` names the field of the request at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @property
    def row(self) -> ErrorRow:
        """The most specific row of the table."""
        return next(ERROR_TABLE[cls] for cls in type(self).__mro__ if cls in ERROR_TABLE)


class InvalidParameter(GatewayError):
    pass


class MissingParameter(InvalidParameter):
    pass


class UnknownParameter(InvalidParameter):
    pass


class UnsupportedParameter(InvalidParameter):
    pass


class ContextTooLong(InvalidParameter):
    pass


class InvalidBody(GatewayError):
    pass


class BodyTooLarge(GatewayError):
    pass


class InvalidApiKey(GatewayError):
    pass


class InsufficientScope(GatewayError):
    pass


class TenantSuspended(GatewayError):
    pass


class ModelNotFound(GatewayError):
    pass


class Overloaded(GatewayError):
    pass


class DatabaseUnavailable(GatewayError):
    pass


class AdapterMismatch(GatewayError):
    pass


class EngineFailed(GatewayError):
    """The engine ended the request; an unknown code counts as an internal error."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message, failure.field)
        self.code = failure.code

    @property
    def row(self) -> ErrorRow:
        return ENGINE_TABLE.get(self.code, INTERNAL)


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

INTERNAL: Final = ErrorRow(500, _SERVER, "internal_error")

ERROR_TABLE: Final[dict[type[Exception], ErrorRow]] = {
    GatewayError: INTERNAL,
    InvalidParameter: ErrorRow(400, _INVALID, "invalid_value"),
    MissingParameter: ErrorRow(400, _INVALID, "missing_required_parameter"),
    UnknownParameter: ErrorRow(400, _INVALID, "unknown_parameter"),
    UnsupportedParameter: ErrorRow(400, _INVALID, "unsupported_parameter"),
    ContextTooLong: ErrorRow(400, _INVALID, "context_length_exceeded"),
    InvalidBody: ErrorRow(400, _INVALID, "invalid_json"),
    BodyTooLarge: ErrorRow(413, _INVALID, "request_too_large"),
    InvalidApiKey: ErrorRow(401, "authentication_error", "invalid_api_key"),
    InsufficientScope: ErrorRow(403, "permission_error", "insufficient_scope"),
    TenantSuspended: ErrorRow(403, "permission_error", "tenant_suspended"),
    ModelNotFound: ErrorRow(404, _INVALID, "model_not_found"),
    Overloaded: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    DatabaseUnavailable: ErrorRow(503, _SERVER, "database_unavailable", retry_after_s=2),
    AdapterMismatch: ErrorRow(500, _SERVER, "adapter_mismatch"),
}

ENGINE_TABLE: Final[dict[str, ErrorRow]] = {
    engine_errors.InvalidRequest.code: ErrorRow(400, _INVALID, "invalid_value"),
    engine_errors.PromptTooLong.code: ErrorRow(400, _INVALID, "context_length_exceeded"),
    engine_errors.UnsupportedFeature.code: ErrorRow(400, _INVALID, "unsupported_parameter"),
    engine_errors.EngineOverloaded.code: ErrorRow(503, _SERVER, "overloaded", retry_after_s=1),
    engine_errors.EngineUnavailable.code: ErrorRow(503, _SERVER, "engine_unavailable", retry_after_s=2),
    engine_errors.RequestTimeout.code: ErrorRow(504, _SERVER, "timeout"),
    engine_errors.NonFiniteLogits.code: ErrorRow(500, _SERVER, "non_finite_logits"),
    engine_errors.AdapterError.code: ErrorRow(500, _SERVER, "adapter_error"),
    engine_errors.AdapterLoadFailed.code: ErrorRow(500, _SERVER, "adapter_load_failed"),
    engine_errors.AdapterTooLarge.code: ErrorRow(400, _INVALID, "adapter_too_large"),
    engine_errors.AdapterQuarantined.code: ErrorRow(503, _SERVER, "adapter_quarantined", retry_after_s=30),
}


def from_engine_error(error: engine_errors.EngineError) -> EngineFailed:
    """The client's view of an engine error that was raised in this process."""
    field = error.field if isinstance(error, engine_errors.InvalidRequest) else None
    return EngineFailed(Failed(request_id="", code=error.code, message=str(error), field=field))


def error_body(row: ErrorRow, message: str, param: str | None = None) -> dict[str, dict[str, str | None]]:
    """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
    return {"error": {"message": message, "type": row.type, "param": param, "code": row.code}}
