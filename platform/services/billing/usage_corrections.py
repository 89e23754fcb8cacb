"""Use cases on the usage ledger: an operator takes the usage of a request back."""

from typing import Any, Final
from uuid import UUID

from loraplex.tenants.ledger.corrections import UsageCorrections
from loraplex.tenants.models import UsageRecord
from loraplex.tenants.unit_of_work import UnitOfWork

ACTION: Final = "usage.correct"


async def reverse(uow: UnitOfWork, record_id: UUID, reason: str) -> UsageRecord:
    """Reverse the usage record of a request, as an operator; return the correction.

    The caller has the tenant's counters rebuilt after the commit. Raises `RequestNotFound`, `AlreadyCorrected`,
    `InvalidField`.
    """
    correction = await UsageCorrections(uow.session).reverse(record_id, reason)
    await uow.audit.record(
        ACTION, f"requests/{record_id}", None, snapshot(correction), tenant_id=correction.tenant_id
    )
    return correction


def snapshot(correction: UsageRecord) -> dict[str, Any]:
    """A correction as an audit entry has it."""
    return {
        "correction_id": str(correction.id),
        "reason": correction.reason,
        "tokens": correction.uncached_tokens + correction.cached_tokens + correction.completion_tokens,
        "amount_pico": str(correction.amount_pico),
        "currency": correction.currency,
    }
