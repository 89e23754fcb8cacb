"""Admission of one call: asked once everything about its size is known. The engine may begin when the counters have let
the call in, while the books are still being written.

Invariant: nothing of an answer leaves before its admission is in the books, and what was admitted is settled or given
back, also when the client leaves while it is being admitted.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from loraplex.platform.errors import GatewayError
from loraplex.platform.inference.background_tasks import DetachedWork
from loraplex.platform.inference.inference_call import InferenceCall
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.rate_limit_headers import rate_headers, refusal_headers, unavailable_headers
from loraplex.tenants.admission.controller import RequestAdmissions
from loraplex.tenants.errors import LimitExceeded, PolicyStale, QuotaUnavailable, TenantsError
from loraplex.tenants.ids import uuid7
from loraplex.tenants.quotas.reservation import Admission, AdmissionRequest, LetIn

LOG = structlog.get_logger("loraplex.admission")


class Entry:
    """A call that the counters have let in, and the books perhaps not yet."""

    def __init__(self, call: InferenceCall, admitting: "asyncio.Task[Admission]") -> None:
        self._call = call
        self._admitting = admitting

    async def admitted(self) -> Admission:
        """To be awaited before anything of the answer leaves; then its headers are known. Raises what
        `RequestAdmission.enter` does: a call may be refused after all.
        """
        try:
            admission = await asyncio.shield(self._admitting)
        except LimitExceeded as error:
            self._call.headers.update(refusal_headers(error))
            raise
        except QuotaUnavailable as error:
            self._call.headers.update(unavailable_headers(error))
            raise
        self._call.headers.update(rate_headers(admission.rate, degraded=admission.degraded))
        return admission

    async def admitted_or_none(self) -> Admission | None:
        """None: it was refused, as whoever awaited `admitted` has heard."""
        try:
            return await asyncio.shield(self._admitting)
        except (TenantsError, GatewayError) as error:
            LOG.debug("a call was refused after it was let in", reason=type(error).__name__)
            return None


class RequestAdmission:
    """Admits the calls of one gateway."""

    def __init__(self, admissions: RequestAdmissions, detached: DetachedWork) -> None:
        self._admissions = admissions
        self._detached = detached

    async def enter(
        self, call: InferenceCall, model: ResolvedModel, prompt_tokens: int, completion_tokens: int
    ) -> Entry:
        """`completion_tokens` is the most that all choices may have. A caller whose policy is stale is read anew, once.

        Raises `LimitExceeded`, `PolicyStale` or `StoreUnavailable` of tenants, and what authentication raises.
        """
        known = asyncio.get_running_loop().create_future()

        def tell(_: object = None) -> None:
            if not known.done():
                known.set_result(None)

        admitting = self._detached.begin(self._admit(call, model, prompt_tokens, completion_tokens, tell))
        admitting.add_done_callback(tell)
        entry = Entry(call, admitting)
        try:
            await known
        except asyncio.CancelledError:
            self._detached.begin(self._give_back(entry))
            raise
        if admitting.done():
            await entry.admitted()
        return entry

    @asynccontextmanager
    async def given_back_on_error(self, entry: Entry) -> AsyncIterator[None]:
        """Gives the admission back when what it was for does not begin."""
        try:
            yield
        except BaseException:
            await self._detached.finish(self._give_back(entry))
            raise

    async def _admit(
        self,
        call: InferenceCall,
        model: ResolvedModel,
        prompt_tokens: int,
        completion_tokens: int,
        let_in: LetIn,
    ) -> Admission:
        try:
            return await self._ask(call, model, prompt_tokens, completion_tokens, let_in)
        except PolicyStale:
            await call.renew()
            return await self._ask(call, model, prompt_tokens, completion_tokens, let_in)

    async def _ask(
        self,
        call: InferenceCall,
        model: ResolvedModel,
        prompt_tokens: int,
        completion_tokens: int,
        let_in: LetIn,
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
        return await self._admissions.admit(request, let_in)

    async def _give_back(self, entry: Entry) -> None:
        admission = await entry.admitted_or_none()
        if admission is not None:
            await self._admissions.release(admission)
