"""Use cases on the usage ledger: an operator takes the usage of a request back."""

from typing import Any, Final
from uuid import UUID

from loraplex.tenants.ledger.corrections import UsageCorrections
from loraplex.tenants.models import UsageRecord
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.usage.records import CorrectionDocument

ACTION: Final = "usage.correct"


async def reverse(uow: UnitOfWork, request_id: UUID, reason: str) -> CorrectionDocument:
    """Reverse the usage record of a request, as an operator; return the correction.

    The caller has the tenant's counters rebuilt after the commit. Raises `RequestNotFound`, `AlreadyCorrected`,
    `InvalidField`.
    """
    correction = await UsageCorrections(uow.session).reverse(request_id, reason)
    await uow.audit.record(
        ACTION, f"requests/{request_id}", None, snapshot(correction), tenant_id=correction.tenant_id
    )
    return CorrectionDocument(
        id=correction.id,
        request_id=request_id,
        tenant_id=correction.tenant_id,
        reason=correction.reason or "",
        prompt_tokens=correction.uncached_tokens + correction.cached_tokens,
        cached_tokens=correction.cached_tokens,
        completion_tokens=correction.completion_tokens,
        reasoning_tokens=correction.reasoning_tokens,
        amount_pico=correction.amount_pico,
        currency=correction.currency,
    )


def snapshot(correction: UsageRecord) -> dict[str, Any]:
    """A correction as an audit entry has it."""
    return {
        "correction_id": str(correction.id),
        "reason": correction.reason,
        "tokens": correction.uncached_tokens + correction.cached_tokens + correction.completion_tokens,
        "amount_pico": str(correction.amount_pico),
        "currency": correction.currency,
    }
