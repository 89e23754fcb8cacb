"""A fake admission controller without stores: it admits everything unless a test decides otherwise, and records its calls."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from loraplex.tenants.admission.allowance import CompletionAllowance
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.counter_drift import DriftLog
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.billing.pricing import NO_PRICE
from loraplex.tenants.counters.counter_replies import Explanation, LimitUse
from loraplex.tenants.errors import LimitExceeded, PolicyStale
from loraplex.tenants.ledger.failed_requests import Failure
from loraplex.tenants.ledger.usage_ledger import Ended
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.limits import Subject
from loraplex.tenants.quotas.reservation import (
    OnProvisional,
    Reservation,
    ReservationRequest,
    SettledUsage,
)
from loraplex.tenants.rate_state import RateState


class FakeAdmissions(QuotaAdmissionController):
    """`policy_epoch`: the newest that was published. `refusals` are raised by the next admissions, one each. `before_confirmation`: what
    happens between the provisional admission of a request and its admission.
    """

    degraded = False

    def __init__(self) -> None:
        self.rate = RateState(requests=None, tokens=None)
        self.refusals: list[Exception] = []
        self.before_confirmation: Callable[[], Awaitable[None]] | None = None
        self.asked: list[ReservationRequest] = []
        self.settled: list[tuple[Reservation, SettledUsage]] = []
        self.cancelled: list[Reservation] = []
        self.published: list[UUID] = []
        self.explanations: dict[tuple[UUID, str], Explanation] = {}
        self.policy_epoch = 0
        self.recent: LimitExceeded | None = None
        self.followed: list[Callable[[], SettledUsage]] = []
        self.on_policy_outdated: Callable[[UUID], None] = lambda _: None
        self.on_ended: Callable[[Ended], None] = lambda _: None
        self.failures: list[Failure] = []
        self.recounted: list[UUID] = []
        reconciliation: Any = SimpleNamespace(log=DriftLog())
        self.reconciliation = reconciliation

    async def admit(
        self, request: ReservationRequest, on_provisional: OnProvisional | None = None
    ) -> Reservation:
        self.asked.append(request)
        await self.require_policy(request.tenant_id, request.policy_epoch)
        if self.refusals:
            raise self.refusals.pop(0)
        if self.before_confirmation is not None:
            if on_provisional is not None:
                on_provisional()
            await self.before_confirmation()
        now = datetime.now(UTC)
        periods = periods_of(now)
        return Reservation(
            request=request,
            day=periods.day,
            month=periods.month,
            admitted_at=now,
            price=NO_PRICE,
            rate=self.rate,
            degraded=self.degraded,
        )

    async def allowance(self, request: ReservationRequest, *, unused: bool = False) -> CompletionAllowance:
        return CompletionAllowance(None, None)

    def recent_refusal(self, key: AuthenticatedKey, request_id: str) -> LimitExceeded | None:
        return self.recent

    def follow(self, reservation: Reservation, used_so_far: Callable[[], SettledUsage]) -> None:
        self.followed.append(used_so_far)

    def note_failure(self, failure: Failure) -> None:
        self.failures.append(failure)

    @property
    def refused(self) -> list[Failure]:
        return [each for each in self.failures if each.is_refused]

    async def require_policy(self, tenant_id: UUID, policy_epoch: int) -> None:
        if policy_epoch < self.policy_epoch:
            raise PolicyStale("a newer policy was published")

    async def settle(self, reservation: Reservation, usage: SettledUsage) -> None:
        self.settled.append((reservation, usage))

    async def cancel(self, reservation: Reservation, *, refused: bool = False) -> None:
        self.cancelled.append(reservation)

    async def recount(self, tenant_id: UUID) -> None:
        self.recounted.append(tenant_id)

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse]:
        return []

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        return self.explanations.get((tenant_id, request_id))

    async def publish(self, tenant_id: UUID) -> None:
        self.published.append(tenant_id)
