"""Admission of one call: asked once everything about its size is known, and before anything is done for it.

Invariant: what was admitted is settled or given back, also when the client leaves while it is being admitted.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from loraplex.platform.detached_work import DetachedWork
from loraplex.platform.inference_call import InferenceCall
from loraplex.platform.model_names import ResolvedModel
from loraplex.platform.rate_headers import rate_headers, refusal_headers
from loraplex.platform.services import RequestAdmissions
from loraplex.tenants.admission.admission import Admission, AdmissionRequest
from loraplex.tenants.errors import LimitExceeded, PolicyStale, TenantsError
from loraplex.tenants.uuid7 import uuid7

LOG = structlog.get_logger("loraplex.admission")


class RequestAdmission:
    """Admits the calls of one gateway."""

    def __init__(self, admissions: RequestAdmissions, detached: DetachedWork) -> None:
        self._admissions = admissions
        self._detached = detached

    async def admit(
        self, call: InferenceCall, model: ResolvedModel, prompt_tokens: int, completion_tokens: int
    ) -> Admission:
        """`completion_tokens` is the most that all choices may have. A caller whose policy is stale is read anew, once.

        Raises `LimitExceeded`, `PolicyStale` or `StoreUnavailable` of tenants, and what authentication raises.
        """
        try:
            try:
                admission = await self._ask(call, model, prompt_tokens, completion_tokens)
            except PolicyStale:
                await call.renew()
                admission = await self._ask(call, model, prompt_tokens, completion_tokens)
        except LimitExceeded as error:
            call.headers.update(refusal_headers(error))
            raise
        call.headers.update(rate_headers(admission.rate, degraded=admission.degraded))
        return admission

    @asynccontextmanager
    async def released_on_error(self, admission: Admission) -> AsyncIterator[None]:
        """Gives the admission back when what it was for does not begin."""
        try:
            yield
        except BaseException:
            await self._detached.finish(self._admissions.release(admission))
            raise

    async def _ask(
        self, call: InferenceCall, model: ResolvedModel, prompt_tokens: int, completion_tokens: int
    ) -> Admission:
        request = AdmissionRequest(
            id=uuid7(),
            request_id=call.request_id,
            key=call.caller.key,
            adapter_id=model.adapter_id,
            adapter_version=model.version,
            digest=model.digest,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        asking = self._detached.begin(self._admissions.admit(request))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._detached.begin(self._give_back(asking))
            raise

    async def _give_back(self, asking: "asyncio.Task[Admission]") -> None:
        """The client left while it was being admitted."""
        try:
            admission = await asking
        except TenantsError as error:
            LOG.debug("a client left before its refusal", reason=type(error).__name__)
            return
        await self._admissions.release(admission)
