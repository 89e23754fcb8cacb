"""Admits inference requests once all of their sizes are known.

The engine may start once the counters admit a request, while its reservation is written to the journal. Invariant: the
reservation is in the journal before any byte of the response is sent, and every reservation is settled or cancelled, also
when the client leaves.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import GatewayError, InvalidParameter
from loraplex.platform.inference.background_tasks import BackgroundTasks
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.rate_limit_headers import rate_headers, refusal_headers, unavailable_headers
from loraplex.platform.observability.request_record import RequestRecord
from loraplex.platform.parameters.request_object import UnknownNames
from loraplex.tenants.admission.allowance import CompletionAllowance
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.errors import LimitExceeded, PolicyStale, QuotaUnavailable, TenantsError
from loraplex.tenants.ids import uuid7
from loraplex.tenants.quotas.reservation import OnProvisional, Reservation, ReservationRequest

IGNORED_HEADER: Final = "x-loraplex-ignored-parameters"


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """Caller, id and response headers of one request. `headers` are sent with any response, also with an error.

    `renew_caller` and `confirm_caller` authenticate the caller again without the cache and raise as the first
    authentication; `renew_caller` also removes the tenant's keys from the cache. `record`: what metrics and traces learn of the
    request. `model`: what its `model` refers to, once that is known. `is_recorded`: the request is, or will be, in the usage
    ledger. `deadline`: when the client gives it up, in the time of `time.monotonic`. `unknown`: what its body has that the gateway
    does not know. `session`: the label of the session that it belongs to, which `session_label` makes. `names`: as in `Dialect`.
    """

    caller: Caller
    request_id: str
    renew_caller: Callable[[Caller], Awaitable[Caller]]
    confirm_caller: Callable[[Caller], Awaitable[Caller]]
    headers: dict[str, str] = field(default_factory=dict)
    renewals: int = 0
    record: RequestRecord = field(default_factory=RequestRecord)
    model: ResolvedModel | None = None
    is_recorded: bool = False
    deadline: float | None = None
    unknown: UnknownNames | None = None
    session: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def ignore(self, names: str) -> None:
        """Name parameters in the response that have no effect."""
        known = self.headers.get(IGNORED_HEADER)
        self.headers[IGNORED_HEADER] = f"{known}, {names}" if known else names

    def shortened(self, limit_s: float | None) -> float | None:
        """A time limit in seconds from now, or what is left until the deadline, if that is less."""
        left_s = math.inf if self.deadline is None else self.deadline - time.monotonic()
        return limit_s if left_s >= (math.inf if limit_s is None else limit_s) else left_s

    async def renew(self) -> None:
        """Authenticate the caller again without the cache, because its policy is outdated.

        If the key no longer works, the response carries the authentication error and no other headers.
        """
        self.renewals += 1
        self.caller = await self._reauthenticate(self.renew_caller)

    async def confirm(self) -> None:
        """Authenticate the caller again without the cache, when nothing indicates a change. Fails like `renew`."""
        self.caller = await self._reauthenticate(self.confirm_caller)

    async def _reauthenticate(self, authenticate: Callable[[Caller], Awaitable[Caller]]) -> Caller:
        try:
            return await authenticate(self.caller)
        except Exception:
            self.headers.clear()
            raise


class PolicyMoved(Exception):
    """The caller's new policy changes the request: another version, or another default maximum. It begins again."""


LOG = structlog.get_logger("loraplex.admission")
RENEWALS: Final = 4
"""How often one request authenticates its caller again: a tenant's keys may change several times while it is admitted."""


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """What a request may use at most. `completion_tokens` are those of all `sequences`, which are its prompts times `n`."""

    prompt_tokens: int
    completion_tokens: int
    sequences: int


class PendingAdmission:
    """A provisional admission: counted in Valkey, not yet in the journal."""

    def __init__(
        self, context: RequestContext, admitting: "asyncio.Task[Reservation]", sequences: int
    ) -> None:
        self._sequences = sequences
        self.record = context.record
        self._context = context
        self._admitting = admitting
        self._reservation: Reservation | None = None

    async def reservation(self) -> Reservation:
        """Wait for the journal and add the rate-limit headers. Await it before any byte of the response is sent.

        Raises as `InferenceAdmission.admit`: the request may still be refused. Raises `InvalidParameter` for more sequences than
        may ever run at once.
        """
        if self._reservation is not None:
            return self._reservation
        try:
            with self.record.timed("journal"):
                reservation = await self._admitted()
        except LimitExceeded as error:
            never = error.limit == "concurrent_requests" and error.retry_after_s is None
            if never and 1 <= error.limit_value < self._sequences:
                raise InvalidParameter(
                    f"prompts x `n` is {self._sequences}, but must be at most {error.limit_value}: "
                    f"`concurrent_requests` of the {error.level}.",
                    param="n",
                ) from error
            self._context.headers.update(refusal_headers(error))
            raise
        except QuotaUnavailable as error:
            self._context.headers.update(unavailable_headers(error))
            raise
        self._context.headers.update(rate_headers(reservation.rate, degraded=reservation.degraded))
        self.record.causes["admission"] = _causes(reservation, self._context.renewals)
        self._reservation, self.record.ledger_id = reservation, reservation.request.id
        return reservation

    @property
    def policy_moved(self) -> bool:
        """Whether the admission has ended with `PolicyMoved`."""
        ended = self._admitting.done() and not self._admitting.cancelled()
        return ended and isinstance(self._admitting.exception(), PolicyMoved)

    async def reservation_or_none(self) -> Reservation | None:
        """Wait for the journal; return None when the request was refused, which `reservation` has raised."""
        try:
            return await self._admitted()
        except (TenantsError, GatewayError, PolicyMoved) as error:
            LOG.debug("a request was refused after its provisional admission", reason=type(error).__name__)
            return None

    async def _admitted(self) -> Reservation:
        done = self._admitting.done()
        return self._admitting.result() if done else await asyncio.shield(self._admitting)


def _causes(reservation: Reservation, renewals: int) -> dict[str, int | str]:
    """What an admission passed: the limit that is nearest after it, and how often the policy had changed meanwhile."""
    causes: dict[str, int | str] = {}
    if reservation.limits:
        percent, name, level = min(
            (max(0, each.left) * 100 // max(1, each.limit), each.name, each.level)
            for each in reservation.limits
        )
        causes = {"limit": name, "level": level, "left_percent": percent}
    if renewals:
        causes["renewals"] = renewals
    return causes | ({"degraded": 1} if reservation.degraded else {})


class InferenceAdmission:
    """Admits the inference requests of one gateway."""

    def __init__(self, controller: QuotaAdmissionController, background_tasks: BackgroundTasks) -> None:
        self._controller = controller
        self._background_tasks = background_tasks

    def repeat_refusal(self, context: RequestContext) -> None:
        """Raise `LimitExceeded` for a caller whose next request would certainly be refused, as an earlier one was."""
        error = self._controller.recent_refusal(context.caller.key, context.request_id)
        if error is not None:
            context.headers.update(refusal_headers(error))
            raise error

    async def allowance(
        self, context: RequestContext, model: ResolvedModel, prompt_tokens: int, *, unused: bool
    ) -> CompletionAllowance:
        """Return what the caller's limits, or what is `unused` of days and months, can admit of completions.

        Raises `PolicyMoved` under a new policy, and as `admit`.
        """
        request = _request(context, model, RequestSizes(prompt_tokens, 0, 1))
        try:
            return await self._controller.allowance(request, unused=unused)
        except PolicyStale:
            if context.renewals == RENEWALS:
                raise
        await context.renew()
        raise PolicyMoved

    async def admit(
        self,
        context: RequestContext,
        model: ResolvedModel,
        sizes: RequestSizes,
        is_unchanged: Callable[[], Awaitable[bool]],
    ) -> PendingAdmission:
        """Reserve what a request may use.

        A caller whose policy is outdated is authenticated again, at most `RENEWALS` times in one request. `is_unchanged` says
        whether the request has the same model and the same sizes under the new policy; `PolicyMoved` is raised where it has not.
        Raises `LimitExceeded`, `PolicyStale`, `PriceMissing` or `StoreUnavailable` of tenants, and what authentication raises.
        """
        decided = asyncio.get_running_loop().create_future()

        def decide(_: object = None) -> None:
            if not decided.done():
                decided.set_result(None)

        admitting = self._background_tasks.begin(
            self._admit_renewing(context, model, sizes, is_unchanged, decide)
        )
        admitting.add_done_callback(decide)
        pending = PendingAdmission(context, admitting, sizes.sequences)
        try:
            with context.record.timed("admission"):
                await decided
        except asyncio.CancelledError:
            self._background_tasks.begin(self._cancel(pending, refused=False))
            raise
        if admitting.done():
            await pending.reservation()
        return pending

    async def cancel(self, pending: PendingAdmission, error: BaseException) -> None:
        """Cancel the reservation of a request that did not begin because of `error`, and give it back unless its client left.

        Raises `PolicyMoved` where the error was about a request that the new policy changes.
        """
        refused = isinstance(error, Exception)
        await self._background_tasks.finish(self._cancel(pending, refused=refused))
        if refused and pending.policy_moved:
            raise PolicyMoved from error

    async def _admit_renewing(
        self,
        context: RequestContext,
        model: ResolvedModel,
        sizes: RequestSizes,
        is_unchanged: Callable[[], Awaitable[bool]],
        on_provisional: OnProvisional,
    ) -> Reservation:
        while True:
            try:
                return await self._controller.admit(_request(context, model, sizes), on_provisional)
            except PolicyStale:
                if context.renewals == RENEWALS:
                    raise
            await context.renew()
            if not await is_unchanged():
                raise PolicyMoved

    async def _cancel(self, pending: PendingAdmission, *, refused: bool) -> None:
        reservation = await pending.reservation_or_none()
        if reservation is not None:
            await self._controller.cancel(reservation, refused=refused)


def _request(context: RequestContext, model: ResolvedModel, sizes: RequestSizes) -> ReservationRequest:
    """Build the request for a reservation of the caller as it is known now."""
    caller = context.caller
    return ReservationRequest(
        id=uuid7(),
        request_id=context.request_id,
        tenant_id=caller.tenant_id,
        api_key_id=caller.api_key_id,
        policy_epoch=caller.policy_epoch,
        tier=caller.tier,
        adapter_name=model.adapter_name,
        adapter_id=model.adapter_id,
        adapter_version=model.version,
        digest=model.digest,
        prompt_tokens=sizes.prompt_tokens,
        completion_tokens=sizes.completion_tokens,
        sequences=sizes.sequences,
        session=context.session,
        alias=model.alias,
    )
