"""The adapter tiers of several engines in `loraplex plan`: slots, hit rate and reads for adapters of a given popularity.

Requests come to the adapter of rank i with a probability of i ** -s (Zipf), independently; both tiers evict the least recently
used (Che, Tung and Wang, IEEE JSAC 2002). Each adapter has one home, so that the memories of the engines add up.
"""

from dataclasses import dataclass

import numpy as np

from loraplex.engine.capacity.memory_plan import MemoryPlan
from loraplex.platform.startup_errors import SettingsError


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """`in_use` of `adapters` are asked for, `requests_per_second` in all; `zipf` 0: all equally often."""

    adapters: int
    engines: int = 1
    in_use: int | None = None
    zipf: float = 1.0
    requests_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTiers:
    """Slots of adapters of the plan's rank, per engine and in all. `host_slots` include copies of those on the device.

    `device_hit_rate`: of requests whose adapter is on the device. `memory_hit_rate`: or in host memory. The others read the disk.
    """

    engines: int
    adapters: int
    adapters_in_use: int
    zipf: float
    device_slots: int
    host_slots: int
    device_slots_in_all: int
    host_slots_in_all: int
    device_hit_rate: float
    memory_hit_rate: float
    loads_per_second: float | None
    disk_reads_per_second: float | None

    def lines(self) -> list[str]:
        """The tiers for people."""
        text = [
            f"adapters: {self.adapters_in_use:,} of {self.adapters:,} in use, asked for as 1/rank^{self.zipf:g} (Zipf)",
            f"device slots: {self.device_slots:,} per engine, {self.device_slots_in_all:,} on {self.engines}",
            f"host slots: {self.host_slots:,} per engine, {self.host_slots_in_all:,} on {self.engines}",
            f"expected hits: {self.device_hit_rate:.1%} on the device, {self.memory_hit_rate:.1%} with host memory",
        ]
        if self.loads_per_second is not None:
            text.append(
                f"per second: {self.loads_per_second:.2f} loads to the device, {self.disk_reads_per_second:.2f} of them from the disk"
            )
        return text


def adapter_tiers(plan: MemoryPlan, host_bytes: int, demand: AdapterDemand) -> AdapterTiers:
    """Work out the tiers. `host_bytes`: of each engine. Raises `SettingsError`."""
    in_use = demand.adapters if demand.in_use is None else demand.in_use
    if in_use > demand.adapters:
        raise SettingsError(f"--adapters-in-use: {in_use} are more than the {demand.adapters} of --adapters")
    size, device = plan.adapters[0].num_bytes, plan.adapters[0].resident
    host = host_bytes // size if plan.machine.is_cuda else 0
    device_hits = lru_hit_rate(in_use, device * demand.engines, demand.zipf)
    memory_hits = lru_hit_rate(in_use, max(device, host) * demand.engines, demand.zipf)
    rate = demand.requests_per_second
    return AdapterTiers(
        engines=demand.engines,
        adapters=demand.adapters,
        adapters_in_use=in_use,
        zipf=demand.zipf,
        device_slots=device,
        host_slots=host,
        device_slots_in_all=device * demand.engines,
        host_slots_in_all=host * demand.engines,
        device_hit_rate=device_hits,
        memory_hit_rate=memory_hits,
        loads_per_second=None if rate is None else rate * (1 - device_hits),
        disk_reads_per_second=None if rate is None else rate * (1 - memory_hits),
    )


def lru_hit_rate(adapters: int, slots: int, zipf: float) -> float:
    """The share of requests that find their adapter in a memory of `slots`."""
    if slots >= adapters:
        return 1.0
    weights = np.arange(1, adapters + 1, dtype=np.float64) ** -zipf
    shares = weights / weights.sum()
    # In the characteristic time, in requests, as many different adapters are asked for as there are slots.
    low, high = 0.0, 1.0
    while -np.expm1(-shares * high).sum() < slots:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-shares * middle).sum() < slots else (low, middle)
    return float(-(shares * np.expm1(-shares * high)).sum())
