"""Reservations and usage for the tests of the journal."""

from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.billing.pricing import Price, PriceVersion
from loraplex.tenants.ids import uuid7
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest, SettledUsage

TENANT = UUID(int=1)
KEY = UUID(int=2)
ADAPTER = UUID(int=3)
PRICE = PriceVersion(id=UUID(int=4), currency="EUR", price=Price(prompt=3, cached_prompt=2, completion=5))
MAX_BYTES = 64 << 20


def reservation(id: UUID | None = None, *, epoch: int = 4) -> Reservation:
    """An admission of a request with an adapter."""
    request = ReservationRequest(
        id=id or uuid7(),
        tenant_id=TENANT,
        api_key_id=KEY,
        adapter_id=ADAPTER,
        adapter_version=3,
        digest="a" * 64,
        request_id="chatcmpl-0123456789",
        prompt_tokens=100,
        completion_tokens=1000,
        amount_nano=1 << 52,
    )
    return Reservation(
        request=request,
        day="d:2026-11-23",
        month="m:2026-11",
        admitted_at=datetime(2026, 11, 23, 1, 2, 3, 456789, tzinfo=UTC),
        price=PRICE,
        epoch=epoch,
    )


def used(completion_tokens: int) -> SettledUsage:
    """The usage of a completed request."""
    return SettledUsage(outcome="completed", prompt_tokens=100, completion_tokens=completion_tokens)


def progressed(completion_tokens: int) -> SettledUsage:
    """The progress of an open request."""
    return SettledUsage(outcome=None, prompt_tokens=100, completion_tokens=completion_tokens)
