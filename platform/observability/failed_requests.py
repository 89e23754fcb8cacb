"""What a tenant sees of requests that failed or were refused.

Invariant: nothing that a client sent is kept but the name of a model. A message, which may quote a value, a name or a schema, is
replaced by the server's own words, names of its parameters, and numbers of limits.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Final

from loraplex.platform import errors
from loraplex.platform.observability.request_record import GENERATING, FinishedRequest, RequestRecord
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.tenants.errors import LimitExceeded, QuotaUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.failed_requests import Failure
from loraplex.tenants.names import ADAPTER_NAME

MAX_SUMMARY: Final = 400
CLIENT_GONE: Final = errors.ERROR_TABLE[errors.ClientGone].code
_NAME: Final = ADAPTER_NAME.strip("^$")
_MODEL: Final = re.compile(f"{_NAME}([@:]{_NAME})?")
_PLACE: Final = re.compile(r"\.?([A-Za-z_]+)|\[\d{1,6}\]")
_OWN_WORDS: Final = (
    *(LimitExceeded, QuotaUnavailable, errors.ShareExceeded, errors.TooManyFailedChecks, errors.Overloaded),
    *(errors.ContextTooLong, errors.BodyTooLarge, errors.BodyTimeout),
    *(errors.InsufficientScope, errors.AddressNotAllowed),
)
"""Errors whose messages name limits and sizes, and quote nothing."""
_MEANINGS: Final = {
    "api_key_revoked": "The key was revoked while the request ran",
    "context_length_exceeded": "Prompt and answer do not fit into the context",
    "engine_unavailable": "No engine answered; the request may be sent again",
    "invalid_api_key": "The key is revoked or has expired",
    "invalid_json": "The body is no JSON object that this server reads",
    "invalid_schema": "The schema, the regular expression or the grammar is not valid",
    "invalid_value": "A parameter has a value that is not allowed",
    "model_not_found": "No adapter, alias or version has the name that was asked for",
    "schema_not_satisfied": "The answer did not meet its schema",
    "server_shutting_down": "The server was being restarted; the request may be sent again",
    "store_unavailable": "A store that this server depends on did not answer; the request may be sent again",
    "tenant_suspended": "The tenant is suspended",
    "timeout": "The request took longer than its time limit",
    "unsupported_schema": "The schema has something that cannot be enforced",
}
"""By error code. Others say it in words already, such as `unknown_parameter`."""


@dataclass(frozen=True, slots=True)
class FailureObserver:
    """Notes each request to generate that got an error, if its key is known. `served_model`: the name of the base model."""

    note: Callable[[Failure], None]
    served_model: str

    def __call__(self, finished: FinishedRequest) -> None:
        record, state = finished.record, finished.scope["state"]
        code, summary = record.error_code, record.error_summary
        if code in (None, CLIENT_GONE) or summary is None or finished.handler not in GENERATING:
            return
        admitted = finished.tenant_id, finished.key_id, state.get("api_key_id")
        tenant_id, key_id, api_key_id = state.get("refused_key", admitted)
        if tenant_id is None or key_id is None:
            return
        name = record.asked_model if record.call is None else record.call.model
        is_name = isinstance(name, str) and (name == self.served_model or _MODEL.fullmatch(name))
        failure = Failure(
            tenant_id=tenant_id,
            id=record.ledger_id or uuid7(),
            at=datetime.now(UTC),
            is_refused=record.ledger_id is None,
            request_id=finished.request_id,
            key_id=key_id,
            api_key_id=api_key_id,
            adapter_id=record.adapter_id,
            model=str(name) if is_name else None,
            code=str(code),
            status=record.error_status,
            message=summary,
        )
        self.note(failure)


def note_error(record: RequestRecord, error: Exception, row: errors.ErrorRow) -> None:
    """Write to the record of a request which error its client got."""
    record.error_code, record.error_status, record.error_summary = row.code, row.status, summary_of(error)


def summary_of(error: Exception) -> str:
    """Return what is kept of an error, at most `MAX_SUMMARY` characters."""
    if isinstance(error, _OWN_WORDS):
        return str(error)[:MAX_SUMMARY]
    known = errors.describe(error)
    place = _known_place(known.param or "")
    allowed = error.allowed if isinstance(error, errors.InvalidParameter) else None
    if allowed is not None and place == known.param:
        return f"`{place}` must be {allowed}."[:MAX_SUMMARY]
    meaning = _MEANINGS.get(known.row.code, known.row.code.replace("_", " ").capitalize())
    return f"{meaning} (`{place}`)." if place else f"{meaning}."


def _known_place(param: str) -> str:
    """Return as much of a parameter's path as names parameters of this server: the rest are keys of the client's objects."""
    end = 0
    while (part := _PLACE.match(param, end)) and (part[1] is None or part[1] in _names()):
        end = part.end()
    return param[:end]


@cache
def _names() -> frozenset[str]:
    """The fields of all bodies, and of the objects in them."""
    found, classes = set[str](), [RequestObject]
    while classes:
        classes += (each := classes.pop()).__subclasses__()
        found |= {field.alias or name for name, field in each.model_fields.items()}
    return frozenset(found)
