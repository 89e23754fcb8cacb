"""`AdapterLoader`: loads adapters from their source into blobs, one after another, on a thread of its own.

Invariant: no behaviour of a source and no stored file ends the thread. It loads nothing while more than `max_bytes` of
earlier loads wait for room on the device, so that host memory is bounded whatever is requested.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from loraplex.engine.errors import AdapterError, AdapterLoadFailed
from loraplex.engine.lora.memory.packed_adapter import PackedAdapter
from loraplex.engine.lora.site import LoraSite
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef

_logger = logging.getLogger(__name__)


class AdapterSource(Protocol):
    """Where the engine gets an adapter's tensors: local, already validated blobs. The adapters package implements it.

    Called on the loader thread, never in the step loop.
    """

    def load(self, adapter: AdapterRef) -> LoraWeights:
        """Return tensors on the CPU. Raises `AdapterLoadFailed` when the blob is missing or unreadable."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """The outcome of one load, and the seconds it took."""

    adapter: AdapterRef
    result: PackedAdapter | AdapterError
    seconds: float


class AdapterLoader(Protocol):
    """What the pool needs of a loader. All calls come from the step loop and return at once, except `close`."""

    on_loaded: threading.Event
    """Set when a load can be taken."""

    def start(self, adapter: AdapterRef) -> None: ...

    def take(self) -> list[Arrival]: ...

    def release(self, nbytes: int) -> None:
        """Report that this many taken bytes do not wait for room any more."""
        ...

    def close(self) -> None: ...


class Fitting:
    """Checks that an adapter fits the sites: kernels rely on these shapes."""

    def __init__(self, sites: Sequence[LoraSite], max_rank: int) -> None:
        self._modules: Mapping[str, tuple[int, int]] = {
            name: (site.inputs, site.slice_sizes[s]) for site in sites for s, name in enumerate(site.names)
        }
        self._max_rank = max_rank

    def check(self, adapter: AdapterRef, weights: LoraWeights) -> None:
        """Check an adapter. Raises `AdapterLoadFailed` naming the module."""
        if weights.digest != adapter.digest:
            raise AdapterLoadFailed(f"the blob of adapter {adapter.digest} holds {weights.digest}")
        for name, module in weights.modules.items():
            self._check(name, module)

    def _check(self, name: str, module: LoraModule) -> None:
        expected = self._modules.get(name)
        if expected is None:
            raise AdapterLoadFailed(f"module {name!r} is not one of this model's")
        if (module.a.shape[1], module.b.shape[0]) != expected or module.b.shape[1] != module.rank:
            raise AdapterLoadFailed(f"module {name!r} must map {expected[0]} to {expected[1]}")
        if not 1 <= module.rank <= self._max_rank:
            raise AdapterLoadFailed(f"module {name!r} has rank {module.rank}; allowed is 1..{self._max_rank}")


class LoaderThread:
    """Implements `AdapterLoader` on a thread that computes with one core."""

    def __init__(
        self,
        source: AdapterSource,
        fitting: Fitting,
        pack: Callable[[LoraWeights], PackedAdapter],
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes`: the next load waits while more than this is waiting for room."""
        self._source = source
        self._fitting = fitting
        self._pack = pack
        self._max_bytes = max_bytes
        self._clock = clock
        self.on_loaded = threading.Event()
        self._requests: SimpleQueue[AdapterRef | None] = SimpleQueue()
        self._loaded: SimpleQueue[Arrival] = SimpleQueue()
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    def start(self, adapter: AdapterRef) -> None:
        self._requests.put(adapter)

    def take(self) -> list[Arrival]:
        self.on_loaded.clear()
        arrivals: list[Arrival] = []
        while not self._loaded.empty():
            arrivals.append(self._loaded.get())
        return arrivals

    def release(self, nbytes: int) -> None:
        with self._room:
            self._waiting_bytes -= nbytes
            self._room.notify()

    def close(self) -> None:
        with self._room:
            self._closed = True
            self._room.notify()
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Of this thread alone: a second OpenMP team would slow the step loop's (see `threads.py`).
        torch.set_num_threads(1)
        while (adapter := self._requests.get()) is not None:
            self._wait_for_room()
            self._bring(adapter)

    def _bring(self, adapter: AdapterRef) -> None:
        """Load one adapter. A call of its own, so that no blob stays referenced until the next load."""
        began = self._clock()
        result = self._load(adapter)
        if isinstance(result, PackedAdapter):
            with self._room:
                self._waiting_bytes += result.blob.nbytes
        self._loaded.put(Arrival(adapter, result, self._clock() - began))
        self.on_loaded.set()

    def _wait_for_room(self) -> None:
        with self._room:
            self._room.wait_for(lambda: self._closed or self._waiting_bytes <= self._max_bytes)

    def _load(self, adapter: AdapterRef) -> PackedAdapter | AdapterError:
        try:
            weights = self._source.load(adapter)
            self._fitting.check(adapter, weights)
            packed = self._pack(weights)
            _log_quantization(packed)
            return packed
        except AdapterError as error:
            return error
        except Exception as error:  # noqa: BLE001 - no tenant's blob may end the loader
            return AdapterLoadFailed(f"adapter {adapter.digest} could not be loaded: {error}")


def _log_quantization(packed: PackedAdapter) -> None:
    report = packed.report
    if report is not None:
        _logger.info(
            "adapter %s in 8-bit pages: the delta of %s changes most, by %.3g of its norm",
            packed.digest,
            report.worst_module,
            report.worst,
        )
