"""`redis-flush`: Valkey loses all that loraplex has in it, as after a crash without persistence.

Invariant: keys of other programs on the same server stay; each tenant's keys are lost in one step.
"""

from dataclasses import dataclass
from typing import ClassVar

from loraplex.platform.drills.faults.fault import Fault
from loraplex.tenants.valkey import forget_all_tenants, open_valkey, ping


@dataclass(slots=True, kw_only=True)
class RedisFlush(Fault):
    """All counters are lost at once, and `seconds` of traffic follow. Gateways rebuild them: there is nothing to take back."""

    name: ClassVar[str] = "redis-flush"
    allowed_errors: ClassVar[frozenset[str]] = frozenset({"quota_unavailable"})

    async def check(self) -> None:
        client = open_valkey(self.installation.redis_url)
        try:
            await ping(client)
        finally:
            await client.aclose()

    def plan(self) -> str:
        return (
            "delete every key of loraplex in Valkey. The counters of ALL tenants are rebuilt from the ledger and the journals; "
            "their limits per minute start empty, so tenants near such a limit get 429 for up to a minute. Explanations of "
            "earlier refusals are lost. Other programs' keys stay."
        )

    async def begin(self) -> None:
        client = open_valkey(self.installation.redis_url)
        try:
            tenants = await forget_all_tenants(client)
        finally:
            await client.aclose()
        self.notes.append(f"Valkey lost the counters of {tenants} tenants")
