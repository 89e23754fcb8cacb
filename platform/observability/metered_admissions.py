"""Admissions with their metrics: the same calls, timed and counted."""

import time
from collections.abc import Sequence
from uuid import UUID

from loraplex.platform.observability.admission_metrics import AdmissionMetrics
from loraplex.tenants.admission.controller import RequestAdmissions
from loraplex.tenants.counters.counter_replies import Explanation, LimitUse
from loraplex.tenants.errors import LimitExceeded, PolicyStale, QuotaExhausted, StoreUnavailable
from loraplex.tenants.quotas.limits import Subject
from loraplex.tenants.quotas.reservation import Admission, AdmissionRequest, LetIn, Usage, not_told


class MeteredAdmissions:
    """`RequestAdmissions` around others."""

    def __init__(self, admissions: RequestAdmissions, metrics: AdmissionMetrics) -> None:
        self._admissions = admissions
        self._metrics = metrics

    async def admit(self, request: AdmissionRequest, let_in: LetIn = not_told) -> Admission:
        """Times what a request waits for before work on it begins, and until it is in the books."""
        began, waited = time.perf_counter(), None

        def begin() -> None:
            nonlocal waited
            if waited is None:
                waited = time.perf_counter() - began
            let_in()

        try:
            admission = await self._admissions.admit(request, begin)
        except LimitExceeded as error:
            decision = "exhausted" if isinstance(error, QuotaExhausted) else "rate_limited"
            self._metrics.decided(decision, time.perf_counter() - began, error.limit, error.level)
            raise
        except (PolicyStale, StoreUnavailable) as error:
            decision = "stale" if isinstance(error, PolicyStale) else "unavailable"
            self._metrics.decided(decision, time.perf_counter() - began)
            raise
        booked = time.perf_counter() - began
        self._metrics.decided("admitted", booked if waited is None else waited)
        self._metrics.booked(booked)
        if admission.degraded:
            self._metrics.degraded()
        return admission

    async def settle(self, admission: Admission, usage: Usage) -> None:
        began = time.perf_counter()
        await self._admissions.settle(admission, usage)
        used = usage.prompt_tokens + usage.completion_tokens
        self._metrics.settled(admission.hold.tokens, used, time.perf_counter() - began)

    async def release(self, admission: Admission) -> None:
        await self._admissions.release(admission)

    async def quotas(self, tenant_id: UUID, subjects: Sequence[Subject]) -> Sequence[LimitUse]:
        return await self._admissions.quotas(tenant_id, subjects)

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        return await self._admissions.explain(tenant_id, request_id)
