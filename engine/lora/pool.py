"""`AdapterPool`: which adapters are on the device, bounded by bytes and slots, evicted least recently used first.

Invariant: all calls come from the step loop; none waits, or costs more for more resident adapters. A running row's adapter
is pinned. A pinned or arriving adapter never moves. RESIDENT means that the whole adapter has arrived.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from loraplex.engine.errors import AdapterError, AdapterLoadFailed, AdapterQuarantined
from loraplex.engine.lora.load_budget import LoadBudget
from loraplex.engine.lora.loader import AdapterLoader, Arrival
from loraplex.engine.lora.memory.base import AdapterMemory, Placement
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.quarantine import QuarantineTracker
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.messages import AdapterKey, AdapterRef, AdapterTier

MAX_REPORTED = 64


@dataclass(slots=True)
class _Resident:
    placement: Placement
    began: float
    pins: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A loaded adapter without room yet. `is_read`: the loader counts its bytes until it is placed or dropped."""

    packed: PackedAdapter
    is_read: bool


class AdapterPool:
    """Implements `AdapterResidency`. `on_loaded` is set when `poll` would find a load that has ended."""

    def __init__(
        self,
        memory: AdapterMemory,
        loader: AdapterLoader,
        host: HostCache,
        faults: QuarantineTracker,
        budget: LoadBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = memory
        self._loader = loader
        self.on_loaded = loader.on_loaded
        self.host = host
        self._faults = faults
        self.budget = budget
        self._clock = clock
        self._free_slots = list(range(memory.max_slots - 1, -1, -1))
        self._slots: dict[AdapterKey, int] = {}
        self._idle: OrderedDict[AdapterKey, _Resident] = OrderedDict()
        self._pinned: dict[AdapterKey, _Resident] = {}
        self._moving: dict[AdapterKey, _Resident] = {}
        self._loading: set[AdapterKey] = set()
        self._abandoned: set[AdapterKey] = set()
        self._without_room: dict[AdapterKey, _Waiting] = {}
        self._read: set[AdapterKey] = set()
        self._room_changed = False
        self._errors: dict[AdapterKey, AdapterError] = {}
        self.num_loads = 0
        self.num_load_failures = 0
        self.num_evictions = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the budget that adapters take, including those being copied."""
        return self.memory.used_bytes

    @property
    def max_bytes(self) -> int:
        return self.memory.max_bytes

    @property
    def worst_page_error(self) -> float:
        """The greatest error that quantizing caused in a module of a resident adapter; 0 without any. O(resident)."""
        residents = (*self._idle.values(), *self._pinned.values())
        reports = (resident.placement.packed.report for resident in residents)
        return max((report.worst for report in reports if report is not None), default=0.0)

    @property
    def resident_digests(self) -> list[str]:
        """Least recently used first, adapters in use last. O(resident)."""
        return [digest for _, digest in self.device_keys]

    @property
    def device_keys(self) -> list[AdapterKey]:
        """In the order of `resident_digests`."""
        return [*self._idle, *self._pinned]

    @property
    def quarantined(self) -> list[AdapterKey]:
        """Adapters that are refused until this engine ends; the newest `MAX_REPORTED` of them."""
        return self._faults.quarantined(MAX_REPORTED)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def slots(self) -> Mapping[AdapterKey, int]:
        """Slot of every resident adapter: a view, not a copy."""
        return MappingProxyType(self._slots)

    def state(self, adapter: AdapterRef) -> AdapterState:
        key = adapter.key
        if self._faults.is_quarantined(key):
            return AdapterState.QUARANTINED
        if key in self._slots:
            return AdapterState.RESIDENT
        if key in self._errors:
            return AdapterState.FAILED
        if key in self._loading or key in self._without_room or key in self._moving:
            return AdapterState.LOADING
        return AdapterState.ABSENT

    def tier(self, adapter: AdapterRef) -> AdapterTier:
        if adapter.key in self._slots:
            return "device"
        return "host" if adapter.key in self.host and adapter.key not in self._read else "disk"

    def size_bytes(self, adapter: AdapterRef) -> int:
        return self.budget.known_size(adapter.key)

    def prefetch(self, adapter: AdapterRef) -> bool:
        if self.state(adapter) is not AdapterState.ABSENT:
            return True
        key = adapter.key
        if not self.budget.has_room(key[0]):
            return False
        if self.memory.max_bytes <= 0:
            self._errors[key] = AdapterLoadFailed("this engine serves no adapters")
            return True
        packed = self.host.find(key)
        self.budget.begin(key)
        if packed is None:
            self._loading.add(key)
            self._read.add(key)
            self._loader.start(adapter)
        else:
            self._wait_for_room(key, _Waiting(packed, is_read=False))
        return True

    def lacks_room(self, adapter: AdapterRef) -> bool:
        return adapter.key in self._without_room and not self._room_changed

    def place(self, adapter: AdapterRef) -> None:
        waiting = self._without_room.pop(adapter.key, None)
        if waiting is None:
            return
        self._without_room = {adapter.key: waiting, **self._without_room}
        self._place_all()
        self._install_arrived()

    def load_seconds(self, adapter: AdapterRef) -> float:
        key = adapter.key
        reads = key in self._read or (key not in self._slots and key not in self.host)
        return self.budget.seconds(key, reads=reads)

    def pin(self, adapter: AdapterRef) -> None:
        key = adapter.key
        resident = self._pinned.get(key)
        if resident is None:
            resident = self._pinned[key] = self._idle.pop(key)
        resident.pins += 1

    def unpin(self, adapter: AdapterRef) -> None:
        key = adapter.key
        resident = self._pinned[key]
        resident.pins -= 1
        if not resident.pins:
            self._idle[key] = self._pinned.pop(key)
            self._room_changed = True

    def abandon(self, adapter: AdapterRef) -> None:
        key = adapter.key
        waiting = self._without_room.pop(key, None)
        if waiting is not None:
            self._drop(key, waiting)
        self._errors.pop(key, None)
        if key in self._loading:
            self._abandoned.add(key)

    def forget(self, namespace: bytes) -> None:
        """Drop a tenant's adapters from the device and from host memory; adapters that rows use stay. O(adapters)."""
        for key in [key for key in self._idle if key[0] == namespace]:
            self._evict(key)
        self.host.forget_namespace(namespace)
        self._room_changed = True

    def take_error(self, adapter: AdapterRef) -> AdapterError:
        if self.state(adapter) is AdapterState.QUARANTINED:
            count = self._faults.count(adapter.key)
            return AdapterQuarantined(
                f"adapter {adapter.digest} produced non-finite output {count} times and is quarantined"
            )
        return self._errors.pop(adapter.key)

    def report_non_finite(self, adapter: AdapterRef) -> None:
        """Count a non-finite row of this adapter; repeated ones quarantine it."""
        self._faults.report(adapter.key)

    def poll(self) -> None:
        """Take finished loads, place them as far as there is room, and install adapters that have arrived.

        Called before every schedule. Costs next to nothing while nothing is loaded.
        """
        for arrival in self._loader.take():
            self._arrive(arrival)
        if self._without_room and self._room_changed:
            self._place_all()
        self._install_arrived()

    def close(self) -> None:
        """Stop the threads."""
        self._loader.close()
        self.memory.close()

    def _arrive(self, arrival: Arrival) -> None:
        """Record the outcome of a load. An abandoned load evicts no adapter and leaves no error behind."""
        key, result = arrival.adapter.key, arrival.result
        is_wanted = key not in self._abandoned
        self._loading.discard(key)
        self._abandoned.discard(key)
        if isinstance(result, AdapterError):
            self.num_load_failures += 1
            self._read.discard(key)
            self.budget.end(key)
            if is_wanted:
                self._errors[key] = result
            return
        self.budget.learn(key, result.blob.nbytes)
        self.budget.source.note(result.blob.nbytes, arrival.seconds)
        self.host.keep(key, result)
        waiting = _Waiting(result, is_read=True)
        if is_wanted or (self._free_slots and self.memory.fits(result)):
            self._wait_for_room(key, waiting)
        else:
            self._drop(key, waiting)

    def _wait_for_room(self, key: AdapterKey, waiting: _Waiting) -> None:
        self._without_room[key] = waiting
        self._room_changed = True

    def _place_all(self) -> None:
        """Place waiting adapters in the order of arrival; one that does not fit lets others pass."""
        self._room_changed = False
        for key in list(self._without_room):
            packed = self._without_room[key].packed
            if self._make_room(packed):
                placement = self.memory.place(self._free_slots.pop(), packed)
                self._moving[key] = _Resident(placement, self._clock())
                self._release(self._without_room.pop(key))

    def _make_room(self, packed: PackedAdapter) -> bool:
        """Evict unpinned adapters, least recently used first, until it fits; evict none if it never does."""
        count = self.memory.victims(packed, (resident.placement for resident in self._idle.values()))
        if count is None or not (self._free_slots or self._idle):
            return False
        victims = islice(self._idle, count if self._free_slots else max(count, 1))
        for key in list(victims):
            self._evict(key)
        return True

    def _evict(self, key: AdapterKey) -> None:
        placement = self._idle.pop(key).placement
        self.memory.remove(placement)
        del self._slots[key]
        self._read.discard(key)
        self._free_slots.append(placement.slot)
        self.num_evictions += 1

    def _install_arrived(self) -> None:
        for key in [key for key, moving in self._moving.items() if self.memory.is_there(moving.placement)]:
            self._install(key, self._moving.pop(key))

    def _install(self, key: AdapterKey, resident: _Resident) -> None:
        seconds = self._clock() - resident.began
        self.budget.device.note(resident.placement.packed.blob.nbytes, seconds)
        self.budget.end(key)
        resident.placement = self.memory.install(resident.placement)
        self._slots[key] = resident.placement.slot
        self._idle[key] = resident
        self._room_changed = True
        self.num_loads += 1

    def _drop(self, key: AdapterKey, waiting: _Waiting) -> None:
        """Drop a loaded adapter that is not placed."""
        self._release(waiting)
        self._read.discard(key)
        self.budget.end(key)

    def _release(self, waiting: _Waiting) -> None:
        if waiting.is_read:
            self._loader.release(waiting.packed.blob.nbytes)
