"""Where the versions of one tenant are in memory, by the newest statistics of the engines.

Invariant: an adapter is found by its tenant's cache namespace and digest, so that equal files of another tenant do not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool

Tier: TypeAlias = Literal["device", "host", "disk"]
_ORDER: Final[tuple[Tier, ...]] = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Residency:
    """The digests of one tenant in the memory of any engine. `is_known` False: no engine answers."""

    device: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()
    is_known: bool = True

    def tier(self, digests: Iterable[str]) -> Tier | None:
        """Return the slowest tier among adapters that are stored; None without any, or while no engine answers."""
        tiers = [self._tier(digest) for digest in digests]
        return max(tiers, key=_ORDER.index) if tiers and self.is_known else None

    def _tier(self, digest: str) -> Tier:
        if digest in self.device:
            return "device"
        return "host" if digest in self.host else "disk"


async def residency(engine: EngineClient, namespace: bytes) -> Residency:
    """Return the residency of the tenant with this cache namespace. An engine of a pool is read by its newest snapshot."""
    if isinstance(engine, EnginePool):
        snapshots = [each.last_stats for each in engine.engines if each.connected]
    else:
        try:
            snapshots = [await engine.stats()]
        except EngineUnavailable:
            snapshots = []
    return _of(namespace, [stats for stats in snapshots if stats is not None])


def _of(namespace: bytes, snapshots: list[EngineStats]) -> Residency:
    device, host = set[str](), set[str]()
    for stats in snapshots:
        device |= {digest for owner, digest in stats.device_adapters if owner == namespace}
        host |= {digest for owner, digest in stats.host_adapters if owner == namespace}
    return Residency(frozenset(device), frozenset(host), is_known=bool(snapshots))
