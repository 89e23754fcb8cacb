"""The requests in progress in a gateway: their bound, shared by all tenants (longest queue drop, for requests in place of
packets), and their end with their tenant, key or version.

Invariant: at most `total` sequences are in progress, of one tenant at most half of `total`, or one. A request is shed only for
a tenant that has fewer sequences than its own, and only before the engine has started it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from uuid import UUID

from loraplex.platform.errors import (
    GatewayError,
    InvalidParameter,
    KeyRevoked,
    Overloaded,
    RequestRevoked,
    ShareExceeded,
    TenantStopped,
    VersionDeleted,
)
from loraplex.platform.inference.admission import RequestContext
from loraplex.tenants.ledger.usage_ledger import Ended


class InFlightRequest:
    """The place of one request among those in progress, until `release`."""

    def __init__(self, requests: "InFlightRequests", context: RequestContext, sequences: int) -> None:
        self.tenant_id = context.caller.tenant_id
        self.ended: RequestRevoked | None = None
        """Why the request was ended; None while it was not."""
        self._context = context
        self._stop: Callable[[RequestRevoked], None] | None = None
        self.sequences = sequences
        self._requests = requests
        self._deadline: asyncio.Timeout | None = None
        self.was_shed = False
        """Whether the request lost its place to another one."""

    @property
    def may_be_shed(self) -> bool:
        """Whether the request is running `until_started`, the engine has not started it, and nothing has ended it."""
        waits = self._deadline is not None and self._stop is None
        return waits and not self.was_shed and self.ended is None

    def until_started(self) -> "_UntilStarted":
        """Run a block that ends with `started`. An error of the block frees the place.

        Cancels the block and raises `Overloaded` when the request is shed, `RequestRevoked` when it is ended.
        """
        self._deadline = asyncio.timeout(None)
        return _UntilStarted(self, self._deadline)

    def started(self, stop: Callable[[RequestRevoked], None]) -> None:
        """Keep the place until `release`; `stop` ends what runs. Raises what ended the block, if that has just happened."""
        if self.was_shed or self.ended is not None:
            raise self.reason()
        self._stop = stop

    def shed(self) -> None:
        """Free the place at once and cancel the block of `until_started`."""
        self.release()
        self.was_shed = True
        self._cancel()

    def end(self, ended: Ended) -> None:
        """End the request if its tenant, key or version has ended: cancel the block of `until_started`, or stop what runs."""
        error = self._ended_by(ended)
        if error is None or self.ended is not None:
            return
        self.ended = error
        if self._stop is not None:
            self._stop(error)
        else:
            self._cancel()

    def reason(self) -> GatewayError:
        """Why the block of `until_started` was cancelled."""
        return self.ended or Overloaded(
            "The server is full, and this request gave way to one of a tenant with fewer; try again."
        )

    def _ended_by(self, ended: Ended) -> RequestRevoked | None:
        caller, model = self._context.caller, self._context.model
        if caller.policy_epoch <= ended.policy_epoch:
            return TenantStopped("The tenant was suspended or deleted while this request ran.")
        if caller.api_key_id in ended.key_ids:
            return KeyRevoked("The API key was revoked while this request ran.")
        if model is not None and (model.adapter_id, model.version) in ended.versions:
            return VersionDeleted(f"`{model.adapter}` was deleted while this request ran.", param="model")
        return None

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def release(self) -> None:
        """Free the place. May be repeated."""
        self._requests.remove(self)


class _UntilStarted:
    """The block of `until_started`: no generator, since every request has one."""

    def __init__(self, request: InFlightRequest, deadline: asyncio.Timeout) -> None:
        self._request = request
        self._deadline = deadline

    async def __aenter__(self) -> None:
        await self._deadline.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._deadline.__aexit__(kind, error, trace)
        except TimeoutError:
            self._request.release()
            raise self._request.reason() from None
        if error is not None:
            self._request.release()
            if isinstance(error, TimeoutError) and self._deadline.expired():
                raise self._request.reason() from None


class InFlightRequests:
    """The requests in progress in one gateway, on its event loop."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._per_tenant = max(1, total // 2)
        self._by_tenant: dict[UUID, dict[InFlightRequest, None]] = {}
        self._sequences: Counter[UUID] = Counter()

    def add(self, context: RequestContext, sequences: int) -> InFlightRequest:
        """Add a request of `sequences`, its prompts times `n`. Larger tenants' newest requests are shed where it needs room.

        Raises `ShareExceeded`, `Overloaded`, or `InvalidParameter` for a request that never fits.
        """
        tenant_id = context.caller.tenant_id
        if sequences > self._per_tenant:
            raise InvalidParameter(
                f"prompts x `n` is {sequences}, but must be at most {self._per_tenant}.", param="n"
            )
        own = self._sequences[tenant_id] + sequences
        if own > self._per_tenant:
            raise ShareExceeded(
                f"This tenant may have {self._per_tenant} sequences in progress, and this request has {sequences}; try again.",
                limit="sequences",
            )
        for each in self._to_shed(own, self._sequences.total() + sequences - self._total):
            each.shed()
        request = InFlightRequest(self, context, sequences)
        self._by_tenant.setdefault(tenant_id, {})[request] = None
        self._sequences[tenant_id] = own
        return request

    def end(self, ended: Ended) -> None:
        """End the requests of those that ended."""
        for request in [*self._by_tenant.get(ended.tenant_id, ())]:
            request.end(ended)

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request; one that is not here has no effect."""
        requests = self._by_tenant.get(request.tenant_id, {})
        if request not in requests:
            return
        del requests[request]
        self._sequences[request.tenant_id] -= request.sequences
        if not requests:
            del self._by_tenant[request.tenant_id], self._sequences[request.tenant_id]

    def _to_shed(self, own: int, missing: int) -> list[InFlightRequest]:
        """Choose requests that free `missing` sequences, each the newest of the largest tenant that has more than `own`.

        Raises `Overloaded` when there are not enough.
        """
        if missing <= 0:
            return []
        sizes = {tenant_id: size for tenant_id, size in self._sequences.items() if size > own}
        waiting = {
            tenant_id: [each for each in self._by_tenant[tenant_id] if each.may_be_shed]
            for tenant_id in sizes
        }
        chosen: list[InFlightRequest] = []
        while missing > 0:
            larger = [tenant_id for tenant_id, size in sizes.items() if size > own and waiting[tenant_id]]
            if not larger:
                raise Overloaded("The server has as many sequences in progress as it can; try again.")
            newest = waiting[max(larger, key=sizes.__getitem__)].pop()
            chosen.append(newest)
            sizes[newest.tenant_id] -= newest.sequences
            missing -= newest.sequences
        return chosen
