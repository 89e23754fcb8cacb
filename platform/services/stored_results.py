"""Runs the use case of a form once, however often the form is sent: a repetition gets the first result.

Invariant: the result is stored, encrypted, in the transaction of the change.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from loraplex.tenants.idempotency import RepeatableRequest
from loraplex.tenants.stored_responses import EncryptedResponses, StoredResponse
from loraplex.tenants.unit_of_work import UnitOfWork

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentForm:
    """A form as it was sent. `author`: who sent it; `key`: the key it was rendered with; `route`: method and path."""

    author: str
    key: str
    route: str
    sha256: bytes


async def run_once(
    uow: UnitOfWork,
    form: SentForm,
    responses: EncryptedResponses,
    work: Callable[[], Awaitable[ResultT]],
    returns: type[ResultT],
) -> ResultT:
    """Return the result of `work`, of type `returns`, or the one stored for the same form. `returns` is a type that msgspec
    writes as JSON.

    Raises `IdempotencyInUse`, `IdempotencyMismatch`, `StoredResponseUnreadable` of tenants.
    """
    request = RepeatableRequest(
        caller=form.author,
        key=form.key,
        route=form.route,
        body_sha256=form.sha256,
        tenant_id=uow.tenant_id,
    )

    async def stored() -> StoredResponse:
        return StoredResponse(200, [], msgspec.json.encode(await work()))

    return msgspec.json.decode((await uow.once(request, responses, stored)).body, type=returns)
