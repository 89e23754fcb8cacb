"""A pool of one site under test: a source that tests can block or break, and waits at points that a test chooses."""

import threading
from collections.abc import Callable
from functools import partial

import torch
from tests.engine.lora.immediate_stream import ImmediateStream
from torch import Tensor

from loraplex.engine.lora.load_budget import LoadBudget
from loraplex.engine.lora.loader import Fitting, LoaderThread
from loraplex.engine.lora.memory.base import AdapterMemory
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.host_memory import HostAdapterMemory
from loraplex.engine.lora.memory.page_copy import PageCopy, copy_pages
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.pool import AdapterPool
from loraplex.engine.lora.quarantine import QuarantineTracker
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import LoraSite, make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef

CPU = torch.device("cpu")
NAME = "layers.0.o_proj"
INPUTS, OUTPUTS = 8, 5
MAX_RANK = 16
RANK_BYTES = (INPUTS + OUTPUTS) * 4
TIMEOUT_S = 60.0

LOADING, RESIDENT, ABSENT = AdapterState.LOADING, AdapterState.RESIDENT, AdapterState.ABSENT
FAILED, QUARANTINED = AdapterState.FAILED, AdapterState.QUARANTINED


class Source:
    """Adapters of one module. `hold` a digest and its load waits for `release`; a digest in `errors` fails."""

    def __init__(self) -> None:
        self.ranks: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}
        self.threads: set[str] = set()
        self.loads: list[str] = []

    def hold(self, digest: str) -> None:
        self.gates[digest] = threading.Event()

    def release(self, digest: str) -> None:
        self.gates.pop(digest).set()

    def load(self, adapter: AdapterRef) -> LoraWeights:
        digest = adapter.digest
        self.threads.add(threading.current_thread().name)
        self.loads.append(digest)
        gate = self.gates.get(digest)
        assert gate is None or gate.wait(TIMEOUT_S)
        if digest in self.errors:
            raise self.errors[digest]
        return weights(digest, self.ranks.get(digest, 1))


def weights(digest: str, rank: int, name: str = NAME, inputs: int = INPUTS) -> LoraWeights:
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn((rank, inputs), generator=generator)
    return LoraWeights(digest, {name: LoraModule(a, torch.randn((OUTPUTS, rank), generator=generator))})


def ref(digest: str, namespace: bytes = b"t") -> AdapterRef:
    return AdapterRef(namespace=namespace, digest=digest, blob_path="")


def contiguous(site: LoraSite, max_bytes: int, max_slots: int) -> AdapterMemory:
    pages = PageFormat(torch.float32)
    return HostAdapterMemory([site], pages, max_bytes=max_bytes, max_slots=max_slots, max_rank=MAX_RANK)


def paged(
    site: LoraSite,
    max_bytes: int,
    max_slots: int,
    pages: PageFormat | None = None,
    start_copy: Callable[[PageCopy], None] | None = None,
) -> DeviceAdapterMemory:
    """An arena in host memory whose copies are over at once, unless `start_copy` is given."""
    return DeviceAdapterMemory(
        [site],
        pages or PageFormat(torch.float32),
        max_bytes=max_bytes,
        max_slots=max_slots,
        max_rank=MAX_RANK,
        device=CPU,
        allocate_blob=HostCache(0).blob,
        stream=ImmediateStream(),
        start_copy=start_copy or partial(copy_pages, ImmediateStream()),
    )


class DrivenPool(AdapterPool):
    """`max_ranks`: the budget, in ranks of the one site. `host_ranks`: that of the host tier."""

    def __init__(
        self,
        source: Source,
        max_ranks: float,
        *,
        max_slots: int = 8,
        quarantine_after: int = 2,
        host_ranks: int = 0,
        under_way: int = 1 << 20,
        max_faulty: int = 4096,
        memory: Callable[[LoraSite, int, int], AdapterMemory] = contiguous,
    ) -> None:
        self.source = source
        self.under_way = under_way
        self.site = make_site((NAME,), INPUTS, (OUTPUTS,), max_slots, CPU, MAX_RANK)
        self.memory = memory(self.site, int(max_ranks * RANK_BYTES), max_slots)
        loader = LoaderThread(source, Fitting([self.site], MAX_RANK), self.memory.pack, max_bytes=under_way)
        host = HostCache(host_ranks * RANK_BYTES)
        faults = QuarantineTracker(quarantine_after, max_faulty)
        super().__init__(self.memory, loader, host, faults, LoadBudget(under_way))

    def wait(self) -> None:
        """Until the loader has brought something; then install it."""
        assert self.on_loaded.wait(TIMEOUT_S)
        self.poll()

    def bring(self, digest: str, rank: int = 1) -> None:
        """Load to the end, whatever it is."""
        self.source.ranks[digest] = rank
        assert self.prefetch(ref(digest))
        self.poll()
        while self.state(ref(digest)) is LOADING:
            self.wait()

    def slot(self, digest: str) -> int:
        return self.slots()[ref(digest).key]

    def pins(self, digest: str) -> int:
        pinned = self._pinned.get(ref(digest).key)
        return 0 if pinned is None else pinned.pins

    def tensors(self, digest: str) -> tuple[Tensor, Tensor]:
        (part,) = self.site.slots[self.slot(digest)]
        assert part is not None
        return part.a, part.b
