"""Admission of one inference call, after all its sizes are known, and the call's caller and response headers.

The engine may start once the counters admit the call, while the ledger is written. Invariant: nothing of a response leaves
before its reservation is in the ledger; what was admitted is settled or cancelled, also when the client leaves meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import GatewayError
from loraplex.platform.inference.background_tasks import BackgroundTasks
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.rate_limit_headers import rate_headers, refusal_headers, unavailable_headers
from loraplex.tenants.admission.controller import AdmissionController
from loraplex.tenants.errors import LimitExceeded, PolicyStale, QuotaUnavailable, TenantsError
from loraplex.tenants.ids import uuid7
from loraplex.tenants.quotas.reservation import OnProvisional, Reservation, ReservationRequest


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """`request_id` is the id on the answer. `headers` go out with the answer, also with one that tells of an error.

    `renewed` and `confirmed` authenticate a caller once more, without any cache, and raise what a first authentication does;
    `renewed` also has what is cached of its tenant forgotten.
    """

    caller: Caller
    request_id: str
    renew_caller: Callable[[Caller], Awaitable[Caller]]
    confirm_caller: Callable[[Caller], Awaitable[Caller]]
    headers: dict[str, str] = field(default_factory=dict)

    async def renew(self) -> None:
        """From here on `caller` is what its key says now. Whoever is none any more is told nothing but that."""
        self.caller = await self._reauthenticate(self.renew_caller)

    async def confirm(self) -> None:
        """As `renew`, where nothing says that anything has changed."""
        self.caller = await self._reauthenticate(self.confirm_caller)

    async def _reauthenticate(self, authenticate: Callable[[Caller], Awaitable[Caller]]) -> Caller:
        try:
            return await authenticate(self.caller)
        except Exception:
            self.headers.clear()
            raise


LOG = structlog.get_logger("loraplex.admission")


class PendingAdmission:
    """A call that the counters have let in, and the books perhaps not yet."""

    def __init__(self, context: RequestContext, admitting: "asyncio.Task[Reservation]") -> None:
        self._context = context
        self._admitting = admitting

    async def reservation(self) -> Reservation:
        """To be awaited before anything of the answer leaves; then its headers are known. Raises what
        `InferenceAdmission.enter` does: a call may be refused after all.
        """
        try:
            reservation = await asyncio.shield(self._admitting)
        except LimitExceeded as error:
            self._context.headers.update(refusal_headers(error))
            raise
        except QuotaUnavailable as error:
            self._context.headers.update(unavailable_headers(error))
            raise
        self._context.headers.update(rate_headers(reservation.rate, degraded=reservation.degraded))
        return reservation

    async def reservation_or_none(self) -> Reservation | None:
        """None: it was refused, as whoever awaited `admitted` has heard."""
        try:
            return await asyncio.shield(self._admitting)
        except (TenantsError, GatewayError) as error:
            LOG.debug("a call was refused after it was let in", reason=type(error).__name__)
            return None


class InferenceAdmission:
    """Admits the calls of one gateway."""

    def __init__(self, controller: AdmissionController, background_tasks: BackgroundTasks) -> None:
        self._controller = controller
        self._background_tasks = background_tasks

    async def admit(
        self, context: RequestContext, model: ResolvedModel, prompt_tokens: int, completion_tokens: int
    ) -> PendingAdmission:
        """`completion_tokens` is the most that all choices may have. A caller whose policy is stale is read anew, once.

        Raises `LimitExceeded`, `PolicyStale` or `StoreUnavailable` of tenants, and what authentication raises.
        """
        decided = asyncio.get_running_loop().create_future()

        def decide(_: object = None) -> None:
            if not decided.done():
                decided.set_result(None)

        admitting = self._background_tasks.begin(
            self._admit_renewing(context, model, prompt_tokens, completion_tokens, decide)
        )
        admitting.add_done_callback(decide)
        pending = PendingAdmission(context, admitting)
        try:
            await decided
        except asyncio.CancelledError:
            self._background_tasks.begin(self._cancel(pending))
            raise
        if admitting.done():
            await pending.reservation()
        return pending

    @asynccontextmanager
    async def cancelled_on_error(self, pending: PendingAdmission) -> AsyncIterator[None]:
        """Gives the admission back when what it was for does not begin."""
        try:
            yield
        except BaseException:
            await self._background_tasks.finish(self._cancel(pending))
            raise

    async def _admit_renewing(
        self,
        context: RequestContext,
        model: ResolvedModel,
        prompt_tokens: int,
        completion_tokens: int,
        on_provisional: OnProvisional,
    ) -> Reservation:
        try:
            return await self._admit_once(context, model, prompt_tokens, completion_tokens, on_provisional)
        except PolicyStale:
            await context.renew()
            return await self._admit_once(context, model, prompt_tokens, completion_tokens, on_provisional)

    async def _admit_once(
        self,
        context: RequestContext,
        model: ResolvedModel,
        prompt_tokens: int,
        completion_tokens: int,
        on_provisional: OnProvisional,
    ) -> Reservation:
        request = ReservationRequest(
            id=uuid7(),
            request_id=context.request_id,
            key=context.caller.key,
            adapter_id=model.adapter_id,
            adapter_version=model.version,
            digest=model.digest,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        return await self._controller.admit(request, on_provisional)

    async def _cancel(self, pending: PendingAdmission) -> None:
        reservation = await pending.reservation_or_none()
        if reservation is not None:
            await self._controller.release(reservation)
