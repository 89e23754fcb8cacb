"""Where the versions of one tenant are in memory, by the newest statistics of the engines.

Invariant: an adapter is found by its tenant's cache namespace and digest, so that equal files of another tenant do not count.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from loraplex.engine.client import EngineClient
from loraplex.engine.messages import EngineStats
from loraplex.platform.web.engine.queries import engine_states

Tier: TypeAlias = Literal["device", "host", "disk"]
_ORDER: Final[tuple[Tier, ...]] = ("device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Residency:
    """The digests of one tenant in the memory of any engine. `is_known` False: no engine answers.

    `refused_by`: the numbers of the engines that refuse a digest's weights now. `read_rate` and `copy_rate`: bytes per second of
    the slowest engine, from disk to host and from host to device; 0 before an engine said.
    """

    device: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()
    is_known: bool = True
    refused_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    read_rate: float = 0.0
    copy_rate: float = 0.0

    def tier(self, digests: Iterable[str]) -> Tier | None:
        """Return the slowest tier among adapters that are stored; None without any, or while no engine answers."""
        tiers = [self._tier(digest) for digest in digests]
        return max(tiers, key=_ORDER.index) if tiers and self.is_known else None

    def load_ms(self, tier: Tier, size_bytes: int) -> float | None:
        """Return by how much the first request of an adapter waits longer, in milliseconds; None where it is not known."""
        if not (self.read_rate and self.copy_rate):
            return None
        seconds = {
            "device": 0.0,
            "host": size_bytes / self.copy_rate,
            "disk": size_bytes / self.read_rate + size_bytes / self.copy_rate,
        }
        return 1000 * seconds[tier]

    def _tier(self, digest: str) -> Tier:
        if digest in self.device:
            return "device"
        return "host" if digest in self.host else "disk"


async def residency(engine: EngineClient, namespace: bytes) -> Residency:
    """Return the residency of the tenant with this cache namespace. An engine of a pool is read by its newest snapshot."""
    states = await engine_states(engine, datetime.now(UTC))
    return _of(namespace, {each.number: each.stats for each in states if each.connected and each.stats})


def _of(namespace: bytes, snapshots: Mapping[int, EngineStats]) -> Residency:
    device, host, refused_by = set[str](), set[str](), defaultdict[str, list[int]](list)
    for number, stats in snapshots.items():
        device |= {digest for owner, digest in stats.device_adapters if owner == namespace}
        host |= {digest for owner, digest in stats.host_adapters if owner == namespace}
        for owner, digest in stats.quarantined_adapters:
            if owner == namespace:
                refused_by[digest].append(number)
    return Residency(
        frozenset(device),
        frozenset(host),
        is_known=bool(snapshots),
        refused_by={digest: tuple(numbers) for digest, numbers in refused_by.items()},
        read_rate=min((each.adapter_read_rate for each in snapshots.values()), default=0.0),
        copy_rate=min((each.adapter_copy_rate for each in snapshots.values()), default=0.0),
    )
