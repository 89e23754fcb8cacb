"""Every limit of a tenant, counted in Valkey by one atomic script per step. Invariant: what is settled and open together
never exceeds a limit, whoever asks at the same time; README.md has the proof.
"""

from collections.abc import Sequence
from uuid import UUID

from redis.asyncio import Redis, RedisCluster

from loraplex.tenants.admission.counter_answer import CounterAnswer, Explanation, Heartbeat, LimitUse, Settled
from loraplex.tenants.admission.counter_request import NOTHING_USED, Actual, CounterRequest, Hold, Seed
from loraplex.tenants.admission.limits import Subject

LEASE_S = 45.0


class Counters:
    """All methods raise `ValkeyUnavailable` when Valkey does not answer in time; then the step may or may not have
    happened, and may be repeated: every one is idempotent.
    """

    def __init__(
        self,
        redis: Redis | RedisCluster,
        patient: Redis | RedisCluster | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        """`redis` serves admissions and has a short timeout; `patient` serves what may take longer, as seeding does."""
        raise NotImplementedError

    async def admit(self, request: CounterRequest) -> CounterAnswer:
        """Tests every limit at every level, then takes from all of them or from none."""
        raise NotImplementedError

    async def settle(
        self, tenant_id: UUID, reservation_id: UUID, actual: Actual, *, charge: Hold | None = None
    ) -> Settled:
        """Ends a reservation with what was really used. Nothing happens to an id without one, unless `charge` says for
        whom and in which periods to count it (once); with an epoch in `charge`, only under that epoch.
        """
        raise NotImplementedError

    async def release(self, tenant_id: UUID, reservation_id: UUID) -> Settled:
        """Ends a reservation unused. An admission of this id that arrives later answers `Ended`."""
        return await self.settle(tenant_id, reservation_id, NOTHING_USED)

    async def reap(self, tenant_id: UUID, reservation_id: UUID, actual: Actual) -> Settled:
        """As `settle`, but only if its lease is over: a heartbeat that came meanwhile wins."""
        raise NotImplementedError

    async def heartbeat(self, tenant_id: UUID, holds: Sequence[Hold]) -> Heartbeat:
        """Extends the leases; a reservation that Valkey lost is made anew under its own epoch (None: any)."""
        raise NotImplementedError

    async def expired(self, tenant_id: UUID) -> list[UUID]:
        """Reservations whose lease is over, longest first; at most 1000."""
        raise NotImplementedError

    async def seed(self, tenant_id: UUID, epoch: int, seed: Seed) -> int:
        """Replaces all counters, unless they are of this epoch or a later one. Returns the epoch in force."""
        raise NotImplementedError

    async def invalidate(self, tenant_id: UUID) -> None:
        """Forgets the counters: the next admission answers `Unseeded`."""
        raise NotImplementedError

    async def read(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse] | None:
        """What is used, of every limit of every subject; None when the counters are not seeded."""
        raise NotImplementedError

    async def publish_policy(self, tenant_id: UUID, policy_epoch: int) -> int:
        """Requests that were read under an older policy are stale from now on. Returns the newest, never smaller."""
        raise NotImplementedError

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was denied; known for the tenant's last 1,000 denials of 24 hours."""
        raise NotImplementedError
