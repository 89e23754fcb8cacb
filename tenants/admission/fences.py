"""Fences: points up to which every gateway has shipped its journal, before counters are rebuilt or files removed; and the news of
whose running requests end (`tenants/running_requests.py`).

Invariant: a gateway confirms a fence only after it treats the fenced counters as outdated and PostgreSQL has all that its
journal had then. So whatever counters of a fenced epoch admitted and was answered is in the ledger (README.md, "Epochs").
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

import structlog

from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.database import Database
from loraplex.tenants.errors import PolicyStale, QuotaUnavailable
from loraplex.tenants.ledger.usage_ledger import Ended, Fence, UsageLedger
from loraplex.tenants.single_flight import SingleFlight

DEFAULTS = AdmissionConfig()
CONFIRMED_PAUSE_SECONDS = 0.02
READ_AGAIN_SECONDS = 1.0
# Without PostgreSQL for longer, a gateway no longer knows which others were alive meanwhile.
SILENT_SHARE = 1 / 3
# By how much PostgreSQL's clock may gain on this gateway's between two polls. Less than what a lease has left at a heartbeat.
MAX_AHEAD_SECONDS = 10.0
LOG = structlog.get_logger("loraplex.fences")


async def ship_everywhere(database: Database, tenant_id: UUID, settings: AdmissionConfig = DEFAULTS) -> None:
    """Wait until every live gateway has shipped its journal: then the ledger has all open requests of the tenant.

    Raises `QuotaUnavailable` when a gateway does not confirm within `fence_s`, `DatabaseUnavailable`.
    """
    ledger = UsageLedger(database)
    try:
        fence = await ledger.raise_fence(tenant_id, outdates=False)
        async with _within(fence, settings.fence_s):
            while await ledger.unconfirmed(fence.number, settings.gateway_live_s):
                await asyncio.sleep(CONFIRMED_PAUSE_SECONDS)
    finally:
        await ledger.close()


@asynccontextmanager
async def _within(fence: Fence, seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        LOG.warning("a gateway did not confirm a fence", fence=fence.number, tenant=str(fence.tenant_id))
        raise QuotaUnavailable("another gateway has not yet shipped its journal; try again") from error


@dataclass(eq=False)
class Fences:
    """The fences that one gateway knows. `ship` ships all that the journal has when it is called. `end` ends what runs here."""

    ledger: UsageLedger
    ship: Callable[[], Awaitable[None]]
    gateway_id: UUID
    settings: AdmissionConfig
    end: Callable[[Ended], None]
    clock: Callable[[], float] = time.monotonic
    _ended_at: dict[UUID, int] = field(default_factory=dict)
    _suspended_under: dict[UUID, int] = field(default_factory=dict)
    _fenced_epochs: dict[UUID, int] = field(default_factory=dict)
    _seen: int = -1
    _confirmed: int = 0
    _database_time: datetime | None = None
    _jumped_at: float = -math.inf
    _starting: SingleFlight[None] = field(default_factory=SingleFlight)
    _confirming: SingleFlight[None] = field(default_factory=lambda: SingleFlight(cancels=False))

    def __post_init__(self) -> None:
        self._connected_since = self._connected_at = self.clock()

    async def ready(self) -> None:
        """Make this gateway known and read all fences, once. Nothing is admitted before. Raises `DatabaseUnavailable`."""
        if self._seen < 0:
            await self._starting.run(None, self._start)

    def outdated(self, tenant_id: UUID, epoch: int) -> bool:
        """Whether a fence has outdated the tenant's counters of this epoch."""
        return epoch <= self._fenced_epochs.get(tenant_id, 0)

    def require_policy(self, tenant_id: UUID, policy_epoch: int) -> None:
        """Raise `PolicyStale` for a caller that was read before something of its tenant ended: its requests would not end."""
        if policy_epoch < self._ended_at.get(tenant_id, 0):
            raise PolicyStale("the caller was read before what its tenant runs was ended")

    async def poll(self) -> None:
        """Read new fences, and confirm them once the journal is shipped. Raises `DatabaseUnavailable`."""
        await self._read()
        if self._seen > self._confirmed:
            try:
                async with asyncio.timeout(READ_AGAIN_SECONDS) as bound:
                    await self._confirming.run(self._seen, self._confirm)
            except TimeoutError:
                # A long journal goes on being shipped: what ends meanwhile must not wait for it.
                if not bound.expired():
                    raise

    async def raise_fence(self, tenant_id: UUID, *, above: int = 0) -> Fence:
        """Outdate the tenant's counters, and wait until every live gateway has confirmed it; return the fence.

        The first rebuild of a tenant waits for nothing: no counters exist. Raises `QuotaUnavailable` when a gateway does not
        confirm within `fence_s`, `DatabaseUnavailable`.
        """
        fence = await self.ledger.raise_fence(tenant_id, above=above)
        if fence.fenced_epoch:
            await self._confirmed_by_all(fence)
        return fence

    async def ship_everywhere(self, tenant_id: UUID) -> bool:
        """Wait until every live gateway has shipped what its journal has now; whether every silent one has, too.

        Raises as `raise_fence`.
        """
        fence = await self.ledger.raise_fence(tenant_id, outdates=False)
        await self._confirmed_by_all(fence)
        return not await self.ledger.unconfirmed(fence.number, None)

    async def _start(self) -> None:
        await self.ledger.record_gateway(self.gateway_id, self.settings.gateway_live_s)
        self._note(*await self.ledger.fences(0))
        self._seen = max(self._seen, 0)

    async def leases_end_before(self) -> datetime | None:
        """PostgreSQL's time, before which leases have ended; None for a whole lease after a jump of its clock: then they all
        seemed to end together, and their gateways need time to renew them. Raises `DatabaseUnavailable`.
        """
        await self._read()
        return self._database_time if self.clock() - self._jumped_at >= self.settings.lease_s else None

    async def _read(self) -> None:
        await self.ready()
        self._note(*await self.ledger.fences(self._seen, self._seen))

    def _note(self, database_time: datetime, fences: list[Fence]) -> None:
        now = self.clock()
        if self._database_time is not None:
            passed_s = (database_time - self._database_time).total_seconds()
            if passed_s - (now - self._connected_at) > MAX_AHEAD_SECONDS:
                LOG.warning("the clock of PostgreSQL has jumped", passed_s=passed_s)
                self._jumped_at = now
        self._database_time = database_time
        if now - self._connected_at > self.settings.gateway_live_s * SILENT_SHARE:
            self._connected_since = now
        self._connected_at = now
        for fence in fences:
            known = self._fenced_epochs.get(fence.tenant_id, 0)
            self._fenced_epochs[fence.tenant_id] = max(known, fence.fenced_epoch)
            self._seen = max(self._seen, fence.number)
            if fence.ended is not None and self._is_new(fence.ended):
                self._ended_at[fence.tenant_id] = fence.policy_epoch
                self.end(fence.ended)

    def _is_new(self, ended: Ended) -> bool:
        """Whether a fence says more than that the tenant was suspended once, which each later one repeats."""
        known = self._suspended_under.get(ended.tenant_id, 0)
        self._suspended_under[ended.tenant_id] = ended.policy_epoch
        return bool(ended.policy_epoch > known or ended.key_ids or ended.versions)

    async def _confirm(self) -> None:
        seen = self._seen
        await self.ship()
        await self.ledger.confirm_fence(self.gateway_id, seen)
        self._confirmed = max(self._confirmed, seen)

    async def _confirmed_by_all(self, fence: Fence) -> None:
        """Wait for the others. One that PostgreSQL did not see lately is dead, unless PostgreSQL itself was away lately."""
        await self.ready()
        async with _within(fence, self.settings.fence_s):
            await self.poll()
            while await self.ledger.unconfirmed(fence.number, self._live_s()):
                await asyncio.sleep(CONFIRMED_PAUSE_SECONDS)

    def _live_s(self) -> float | None:
        """How lately a live gateway was seen; None while this one has not been connected for so long itself, or PostgreSQL's
        clock has jumped since.
        """
        live_s = self.settings.gateway_live_s
        known_since = max(self._connected_since, self._jumped_at)
        return live_s if self.clock() - known_since >= live_s else None
