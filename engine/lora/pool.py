"""`AdapterPool`: adapters resident on the device, bounded by bytes, rank-exact, evicted least recently used first.

Invariant: the step loop calls everything here but `_load`, which alone runs on the loader thread; a running row's
adapter is pinned and never moves. Adapters are reached by address (Punica), never copied to where they are used.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from loraplex.engine.errors import AdapterError, AdapterLoadFailed, AdapterQuarantined, AdapterTooLarge
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import ALIGNMENT, MAX_RANK, LoraSite, LoraSlice
from loraplex.engine.lora.source import AdapterSource
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef

MAX_LOADS_IN_FLIGHT = 4
"""Adapters loading or loaded without room yet: bounds host memory beyond the budget."""

MAX_FAULTY = 4096
"""Adapters whose non-finite rows are remembered; above it the ones reported longest ago are forgotten."""

Key = tuple[bytes, str]


@dataclass(slots=True)
class _Resident:
    slot: int
    nbytes: int
    pins: int = 0


class AdapterPool:
    """Implements `AdapterResidency` for the sites of one decoder."""

    def __init__(
        self,
        sites: list[LoraSite],
        source: AdapterSource,
        *,
        max_bytes: int,
        max_rank: int,
        max_slots: int,
        quarantine_after: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises `ValueError` for a `max_rank` the kernels have no room for."""
        if not 1 <= max_rank <= MAX_RANK:
            raise ValueError(f"max_rank must lie in 1..{MAX_RANK}, got {max_rank}")
        self._sites = sites
        self._source = source
        self._max_bytes = max_bytes
        self._max_rank = max_rank
        self._quarantine_after = quarantine_after
        self._dtype = dtype
        self._device = device
        self._modules = {name: (site, s) for site in sites for s, name in enumerate(site.names)}
        self._resident: OrderedDict[Key, _Resident] = OrderedDict()
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._loading: set[Key] = set()
        self._without_room: dict[Key, LoraWeights] = {}
        self._abandoned: set[Key] = set()
        self._errors: dict[Key, AdapterError] = {}
        self._non_finite: OrderedDict[Key, int] = OrderedDict()
        self._requests: SimpleQueue[AdapterRef | None] = SimpleQueue()
        self._loaded: SimpleQueue[tuple[Key, LoraWeights | AdapterError]] = SimpleQueue()
        self._loader = threading.Thread(target=self._load, name="adapter-loader", daemon=True)
        self._loader.start()
        self.num_loads = 0
        self.num_load_failures = 0
        self.num_evictions = 0
        self.on_loaded = threading.Event()

    @property
    def resident_bytes(self) -> int:
        return sum(resident.nbytes for resident in self._resident.values())

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def resident_digests(self) -> list[str]:
        """Least recently used first."""
        return [digest for _, digest in self._resident]

    @property
    def num_pinned(self) -> int:
        return sum(resident.pins > 0 for resident in self._resident.values())

    @property
    def total_pins(self) -> int:
        return sum(resident.pins for resident in self._resident.values())

    def slots(self) -> Mapping[Key, int]:
        """Slot of every resident adapter."""
        return {key: resident.slot for key, resident in self._resident.items()}

    def slot_of(self, adapter: AdapterRef) -> int:
        """Slot of a resident adapter."""
        return self._resident[adapter.key].slot

    def state(self, adapter: AdapterRef) -> AdapterState:
        key = adapter.key
        if key in self._non_finite and self._non_finite[key] >= self._quarantine_after:
            return AdapterState.QUARANTINED
        if key in self._resident:
            return AdapterState.RESIDENT
        if key in self._errors:
            return AdapterState.FAILED
        if key in self._loading or key in self._without_room:
            return AdapterState.LOADING
        return AdapterState.ABSENT

    def prefetch(self, adapter: AdapterRef) -> bool:
        if self.state(adapter) is not AdapterState.ABSENT:
            return True
        if len(self._loading) + len(self._without_room) >= MAX_LOADS_IN_FLIGHT:
            return False
        if self._max_bytes <= 0:
            self._errors[adapter.key] = AdapterLoadFailed("this engine serves no adapters")
            return True
        self._loading.add(adapter.key)
        self._requests.put(adapter)
        return True

    def pin(self, adapter: AdapterRef) -> None:
        self._resident[adapter.key].pins += 1
        self._resident.move_to_end(adapter.key)

    def unpin(self, adapter: AdapterRef) -> None:
        self._resident[adapter.key].pins -= 1

    def abandon(self, adapter: AdapterRef) -> None:
        key = adapter.key
        self._without_room.pop(key, None)
        self._errors.pop(key, None)
        if key in self._loading:
            self._abandoned.add(key)

    def take_error(self, adapter: AdapterRef) -> AdapterError:
        if self.state(adapter) is AdapterState.QUARANTINED:
            count = self._non_finite[adapter.key]
            return AdapterQuarantined(
                f"adapter {adapter.digest} produced non-finite output {count} times and is quarantined"
            )
        return self._errors.pop(adapter.key)

    def report_non_finite(self, adapter: AdapterRef) -> None:
        """Count a row of this adapter that was not finite; repeated ones quarantine it."""
        self._non_finite[adapter.key] = self._non_finite.get(adapter.key, 0) + 1
        self._non_finite.move_to_end(adapter.key)
        if len(self._non_finite) > MAX_FAULTY:
            self._non_finite.popitem(last=False)

    def poll(self) -> None:
        """Install what the loader has brought, as far as there is room. Called before every schedule."""
        self.on_loaded.clear()
        while not self._loaded.empty():
            key, result = self._loaded.get()
            self._loading.discard(key)
            self._arrive(key, result, abandoned=key in self._abandoned)
            self._abandoned.discard(key)
        for key in list(self._without_room):
            if self._make_room(self._without_room[key].nbytes):
                self._install(key, self._without_room.pop(key))

    def close(self) -> None:
        """Stop the loader thread."""
        self._requests.put(None)
        self._loader.join()

    def _arrive(self, key: Key, result: LoraWeights | AdapterError, abandoned: bool) -> None:
        """Note what a load brought. An abandoned one evicts nobody and leaves no error behind."""
        if isinstance(result, AdapterError):
            self.num_load_failures += 1
            if not abandoned:
                self._errors[key] = result
        elif not abandoned:
            self._without_room[key] = result
        elif self._free_slots and self.resident_bytes + result.nbytes <= self._max_bytes:
            self._install(key, result)

    def _load(self) -> None:
        torch.set_num_threads(
            1
        )  # of this thread: a second OpenMP team would slow the step loop's (step_thread.py)
        while (adapter := self._requests.get()) is not None:
            result: LoraWeights | AdapterError
            try:
                result = self._fitted(adapter, self._source.load(adapter))
            except AdapterError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - no tenant's blob may end the loader
                result = AdapterLoadFailed(f"adapter {adapter.digest} could not be loaded: {error}")
            self._loaded.put((adapter.key, result))
            self.on_loaded.set()

    def _fitted(self, adapter: AdapterRef, weights: LoraWeights) -> LoraWeights:
        """The adapter in the model's type, in one blob on the device, checked against the sites."""
        if weights.digest != adapter.digest:
            raise AdapterLoadFailed(f"the blob of adapter {adapter.digest} holds {weights.digest}")
        for name, module in weights.modules.items():
            self._check(name, module)
        nbytes = sum((m.a.numel() + m.b.numel()) for m in weights.modules.values()) * self._dtype.itemsize
        if nbytes > self._max_bytes:
            raise AdapterTooLarge(
                f"adapter {adapter.digest} takes {nbytes} bytes of at most {self._max_bytes}"
            )
        return LoraWeights(weights.digest, self._blob(weights))

    def _check(self, name: str, module: LoraModule) -> None:
        if name not in self._modules:
            raise AdapterLoadFailed(f"module {name!r} is not one of this model's")
        site, s = self._modules[name]
        expected = (site.inputs, site.slice_sizes[s])
        if (module.a.shape[1], module.b.shape[0]) != expected or module.b.shape[1] != module.rank:
            raise AdapterLoadFailed(f"module {name!r} must map {expected[0]} to {expected[1]}")
        if not 1 <= module.rank <= self._max_rank:
            raise AdapterLoadFailed(f"module {name!r} has rank {module.rank}; allowed is 1..{self._max_rank}")

    def _blob(self, weights: LoraWeights) -> dict[str, LoraModule]:
        """All modules one after another in the order of use: A [rank, in], then B as [rank, out] rows, each at 16 bytes."""
        ordered = [name for name in self._modules if name in weights.modules]
        elements = ALIGNMENT // self._dtype.itemsize
        tensors = [t for name in ordered for t in (weights.modules[name].a, weights.modules[name].b)]
        blob = torch.empty(sum(-(-t.numel() // elements) * elements for t in tensors), dtype=self._dtype)
        modules: dict[str, LoraModule] = {}
        start = 0
        for name in ordered:
            module = weights.modules[name]
            views = []
            for tensor in (module.a, module.b.t()):
                view = blob[start : start + tensor.numel()].view(tensor.shape)
                view.copy_(tensor)
                views.append(view)
                start += -(-tensor.numel() // elements) * elements
            modules[name] = LoraModule(views[0], views[1].t())
        if self._device.type == "cpu":
            return modules
        return _moved(blob, modules, self._device)

    def _make_room(self, nbytes: int) -> bool:
        """Evict unpinned adapters, least recently used first, until `nbytes` fit; evict nothing if they never do."""
        evictable = [key for key, resident in self._resident.items() if not resident.pins]
        free = self._max_bytes - self.resident_bytes
        if free + sum(self._resident[key].nbytes for key in evictable) < nbytes:
            return False
        if not evictable and not self._free_slots:
            return False
        while free < nbytes or not self._free_slots:
            free += self._evict(evictable.pop(0))
        return True

    def _evict(self, key: Key) -> int:
        resident = self._resident.pop(key)
        for site in self._sites:
            site.remove(resident.slot)
        self._free_slots.append(resident.slot)
        self.num_evictions += 1
        return resident.nbytes

    def _install(self, key: Key, weights: LoraWeights) -> None:
        slot = self._free_slots.pop()
        for site in self._sites:
            parts = tuple(_slice(weights.modules.get(name)) for name in site.names)
            if any(part is not None for part in parts):
                site.install(slot, parts)
        self._resident[key] = _Resident(slot, weights.nbytes)
        self.num_loads += 1


def _slice(module: LoraModule | None) -> LoraSlice | None:
    return None if module is None else LoraSlice(module.a, module.b.t())


def _moved(blob: torch.Tensor, modules: dict[str, LoraModule], device: torch.device) -> dict[str, LoraModule]:
    """The same views over one copy of the blob on the device: one transfer per adapter, from pinned memory."""
    target = blob.pin_memory().to(device, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()

    def view(tensor: torch.Tensor) -> torch.Tensor:
        return target.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return {name: LoraModule(view(module.a), view(module.b)) for name, module in modules.items()}
