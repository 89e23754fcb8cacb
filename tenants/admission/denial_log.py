"""Remembers what this gateway refused without asking the counters, so that it can be explained.

Invariant: bounded per tenant and in total. Many denials of one tenant displace that tenant's older denials first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from uuid import UUID

from loraplex.tenants.counters.counter_replies import Explanation

MAX_PER_TENANT = 100
MAX_DENIALS = 10_000
KEPT_SECONDS = 86_400.0


class DenialLog:
    """Denials of all tenants, in memory; newest last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[UUID, str], tuple[float, Explanation]] = OrderedDict()
        self._of_tenant: dict[UUID, OrderedDict[str, None]] = {}

    def remember(self, tenant_id: UUID, explanation: Explanation) -> None:
        """Add a denial; it replaces an older one of the same request."""
        request_id = explanation.request_id
        self._forget(tenant_id, request_id)
        own = self._of_tenant.setdefault(tenant_id, OrderedDict())
        if len(own) >= MAX_PER_TENANT:
            self._forget(tenant_id, next(iter(own)))
        elif len(self._kept) >= MAX_DENIALS:
            self._forget(*next(iter(self._kept)))
        self._of_tenant.setdefault(tenant_id, own)[request_id] = None
        self._kept[tenant_id, request_id] = self._clock(), explanation

    def find(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """The denial of a request; None after a day."""
        self._forget_old()
        _, explanation = self._kept.get((tenant_id, request_id), (0.0, None))
        return explanation

    def __len__(self) -> int:
        return len(self._kept)

    def _forget_old(self) -> None:
        while self._kept:
            (tenant_id, request_id), (at, _) = next(iter(self._kept.items()))
            if self._clock() - at < KEPT_SECONDS:
                return
            self._forget(tenant_id, request_id)

    def _forget(self, tenant_id: UUID, request_id: str) -> None:
        if self._kept.pop((tenant_id, request_id), None) is None:
            return
        own = self._of_tenant[tenant_id]
        del own[request_id]
        if not own:
            del self._of_tenant[tenant_id]
