"""Remembers callers that were just refused for their requests per minute, so that repeating the refusal asks no store.

Invariant: a refusal is repeated only until the bucket can have regained one request, and only under the policy that refused.
A request that is given back ends it here; one that another gateway gives back, within `MAX_SECONDS`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final
from uuid import UUID

from cachetools import LRUCache

from loraplex.tenants.admission.rejections import limit_error
from loraplex.tenants.counters.counter_replies import Decision, Denied, wait
from loraplex.tenants.errors import LimitExceeded
from loraplex.tenants.quotas.limits import Level
from loraplex.tenants.quotas.reservation import ReservationRequest
from loraplex.tenants.rate_state import Rate, RateState

MAX_SUBJECTS: Final = 10_000
MAX_SECONDS: Final = 1.0
SHARED_LEVELS: Final = ("tenant", "group", "key")
"""The levels whose limits all requests share that come from the same tenant, the same group, the same key."""


@dataclass(frozen=True, slots=True)
class RecentRefusal:
    """A decision against any request of a tenant or a key, from `asked_at` until `until`.

    `at`: the counters' time. `tested`: the limits of the same denial that all these requests share.
    """

    decision: Decision
    tested: tuple[Decision, ...]
    at: datetime
    policy_epoch: int
    asked_at: float
    until: float

    def error(self, now: float) -> LimitExceeded:
        """Build the error with the times that are left at `now`."""
        error, elapsed = limit_error(self.decision, self.tested), now - self.asked_at
        if error.retry_after_s is not None:
            error.retry_after_s = max(0.0, error.retry_after_s - elapsed)
        if error.rate is not None:
            error.rate = RateState(_later(error.rate.requests, elapsed), _later(error.rate.tokens, elapsed))
        return error


class RecentRefusals:
    """The recent refusals of one gateway, by tenant, group and key. Adapters have none: a caller may name another one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals: LRUCache[tuple[Level, UUID], RecentRefusal] = LRUCache(MAX_SUBJECTS)
        # By key, with the policy that says so: callers do not name their groups.
        self._groups: LRUCache[UUID, tuple[int, UUID]] = LRUCache(MAX_SUBJECTS)

    def __len__(self) -> int:
        return len(self._refusals)

    def now(self) -> float:
        """Return the time; take it before the counters are asked, since their wait begins when they reply."""
        return self._clock()

    def remember(self, request: ReservationRequest, denied: Denied, asked_at: float) -> None:
        """Remember the denial of a request, for every tenant, group or key that has no request left."""
        if request.limit_root is not None:
            self._groups[request.api_key_id] = request.policy_epoch, request.limit_root
        shared = [subject for subject in request.subjects if subject.level in SHARED_LEVELS]
        for place, subject in enumerate(shared, start=1):
            levels = {each.level for each in shared[:place]}
            tested = tuple(each for each in denied.decisions if each.level in levels)
            failed = [each for each in tested if each.name == "requests_per_minute" and not each.passed]
            if not failed or failed[-1].level != subject.level:
                continue
            until = asked_at + min(wait(failed[-1]), MAX_SECONDS)
            self._refusals[subject.level, subject.id] = RecentRefusal(
                failed[-1], tested, denied.at, request.policy_epoch, asked_at, until
            )

    def forget(self, request: ReservationRequest) -> None:
        """Forget the refusals of the tenant, the key and its root, as key and as group, of a request that is given back."""
        root = request.limit_root or request.api_key_id
        self._refusals.pop(("tenant", request.tenant_id), None)
        for key in (request.api_key_id, root):
            self._refusals.pop(("key", key), None)
        self._refusals.pop(("group", root), None)

    def find(self, tenant_id: UUID, api_key_id: UUID, policy_epoch: int) -> RecentRefusal | None:
        """Return a refusal that still holds for this caller."""
        known_under, root = self._groups.get(api_key_id, (policy_epoch, None))
        places: list[tuple[Level, UUID]] = [("tenant", tenant_id), ("key", api_key_id)]
        if root is not None and known_under == policy_epoch:
            places.insert(1, ("group", root))
        for place in places:
            found = self._refusals.get(place)
            if found is None:
                continue
            if found.policy_epoch == policy_epoch and self._clock() < found.until:
                return found
            if found.policy_epoch <= policy_epoch:
                del self._refusals[place]
        return None


def _later(rate: Rate | None, elapsed: float) -> Rate | None:
    return None if rate is None else replace(rate, reset_s=max(0.0, rate.reset_s - elapsed))
