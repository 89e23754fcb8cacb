"""Copies on a side stream: paced, after previously launched work; an adapter has arrived with its last byte."""

import random
import threading
from bisect import bisect_right
from collections.abc import Iterable

import pytest
import torch
from tests.engine.lora.driven_pool import CPU, DrivenPool, Source, paged, ref
from tests.engine.lora.immediate_stream import ImmediateStream
from torch import Tensor

from loraplex.engine.lora.memory import page_copy
from loraplex.engine.lora.memory.base import Placement
from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.page_copy import (
    BATCHES_IN_FLIGHT,
    CopyThread,
    Mark,
    PageCopy,
    Span,
    copy_pages,
)
from loraplex.engine.lora.memory.page_format import PageFormat
from loraplex.engine.lora.residency import AdapterState
from loraplex.engine.lora.site import LoraSite, make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights

LAYERS = 7


class Point:
    """A mark that a test reaches; waiting for it reaches it, as time would."""

    def __init__(self, stream: "Stream") -> None:
        self.reached = False
        self._stream = stream

    def is_reached(self) -> bool:
        return self.reached

    def wait(self) -> None:
        self._stream.waits += 1
        self.reached = True


class Stream:
    """Copies at once but says so only when a test lets it; notes the order of everything."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.marks: list[Point] = []
        self.waits = 0
        self.most_in_flight = 0
        self.broken = False

    def computed(self) -> Mark | None:
        self.log.append("computed")
        return Point(self)

    def start_after(self, mark: Mark | None) -> None:
        self.log.append("follow")

    def copy(self, target: Tensor, source: Tensor, spans: Iterable[Span]) -> None:
        if self.broken:
            raise RuntimeError("no device")
        self.log.append("copy")
        ImmediateStream().copy(target, source, spans)

    def mark(self) -> Mark:
        self.log.append("mark")
        self.marks.append(Point(self))
        self.most_in_flight = max(self.most_in_flight, sum(not mark.reached for mark in self.marks))
        return self.marks[-1]


def made(stream: Stream) -> tuple[DeviceAdapterMemory, list[PageCopy]]:
    names = [f"layers.{layer}.o_proj" for layer in range(LAYERS)]
    sites: list[LoraSite] = [make_site((name,), 16, (16,), 2, CPU, 16) for name in names]
    started: list[PageCopy] = []
    pool = DeviceAdapterMemory(
        sites,
        PageFormat(torch.float32),
        max_bytes=1 << 16,
        max_slots=2,
        max_rank=16,
        device=CPU,
        allocate_blob=HostCache(0).blob,
        stream=stream,
        start_copy=started.append,
    )
    return pool, started


def adapter() -> LoraWeights:
    modules = {
        f"layers.{i}.o_proj": LoraModule(torch.randn(4, 16), torch.randn(16, 4)) for i in range(LAYERS)
    }
    return LoraWeights("a", modules)


def test_few_batches_are_in_flight_at_once_and_the_last_one_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copy, "BATCH_BYTES", 512)
    stream = Stream()
    pool, started = made(stream)
    placement = pool.place(0, pool.pack(adapter()))
    assert stream.log == ["computed"] and not pool.is_there(placement)
    with pytest.raises(RuntimeError, match="before it has come"):
        pool.install(placement)
    copy_pages(stream, started[0])
    assert stream.log[1] == "follow", "not before the kernels that may still read these pages"
    assert stream.log.count("mark") == LAYERS, "as many batches of two pages"
    assert stream.most_in_flight == BATCHES_IN_FLIGHT and stream.waits == LAYERS - BATCHES_IN_FLIGHT
    for mark in stream.marks[:-1]:
        mark.reached = True
    assert not pool.is_there(placement)
    stream.marks[-1].reached = True
    assert pool.is_there(placement)
    pool.install(placement)
    assert pool._sites[3].slots[0][0] is not None


def test_an_adapter_being_copied_is_loading_and_moves_no_other() -> None:
    """Through the whole pool: RESIDENT is an adapter all of which has come."""
    stream = Stream()
    copies = CopyThread(stream)
    pool = DrivenPool(
        Source(),
        1000,
        max_slots=2,
        memory=lambda site, max_bytes, max_slots: paged(site, max_bytes, max_slots, start_copy=copies.start),
    )
    try:
        pool.prefetch(ref("a"))
        pool.wait()
        for _ in range(1000):
            if stream.marks:
                break
            threading.Event().wait(0.005)
        pool.poll()
        assert pool.state(ref("a")) is AdapterState.LOADING and not pool.slots() and pool.resident_bytes > 0
        pool.abandon(ref("a"))
        assert pool.state(ref("a")) is AdapterState.LOADING, "what is under way arrives"
        for _ in range(1000):
            stream.marks[-1].reached = True
            pool.poll()
            if pool.slots():
                break
            threading.Event().wait(0.005)
        assert pool.state(ref("a")) is AdapterState.RESIDENT
    finally:
        pool.close()
        copies.close()


def test_a_device_that_cannot_copy_breaks_the_engine_not_the_thread() -> None:
    stream = Stream()
    stream.broken = True
    copies = CopyThread(stream)
    pool, started = made(stream)
    placement = pool.place(0, pool.pack(adapter()))
    copies.start(started[0])
    copies.close()
    with pytest.raises(RuntimeError, match="could not be copied"):
        pool.is_there(placement)


PROJECTIONS = {
    ("q_proj", "k_proj", "v_proj"): (4096, (4096, 1024, 1024)),
    ("o_proj",): (4096, (4096,)),
    ("gate_proj", "up_proj"): (4096, (14336, 14336)),
    ("down_proj",): (14336, (4096,)),
}
"""Of Llama 3 8B, which has 32 layers."""
VOCABULARY = 128_256


def sites_of_8b() -> list[LoraSite]:
    layers = [
        make_site(tuple(f"layers.{layer}.{name}" for name in names), inputs, outputs, 16, CPU, 32)
        for layer in range(32)
        for names, (inputs, outputs) in PROJECTIONS.items()
    ]
    return [*layers, make_site(("lm_head",), 4096, (VOCABULARY,), 16, CPU, 32)]


def weights_of_8b(rank: int) -> LoraWeights:
    a = torch.zeros(rank, max(inputs for inputs, _ in PROJECTIONS.values()), dtype=torch.bfloat16)
    modules = {
        f"layers.{layer}.{name}": LoraModule(a[:, :inputs], a[:, :outputs].t())
        for layer in range(32)
        for names, (inputs, widths) in PROJECTIONS.items()
        for name, outputs in zip(names, widths, strict=True)
    }
    return LoraWeights(f"rank {rank}", modules)


def test_an_adapter_of_an_8b_model_comes_in_about_thirty_copies() -> None:
    """Into the empty arena, and after swaps among adapters of another rank. Pages stay where kernels find them."""
    pool = DeviceAdapterMemory(
        sites_of_8b(),
        PageFormat(torch.bfloat16),
        max_bytes=1 << 29,
        max_slots=16,
        max_rank=32,
        device=CPU,
        allocate_blob=HostCache(0).blob,
        stream=ImmediateStream(),
        start_copy=lambda copy: None,
    )
    packed = [pool.pack(weights_of_8b(rank)) for rank in (16, 8)]
    choose = random.Random(1)
    resident: list[Placement] = []
    counts: list[int] = []
    for swap in range(60):
        wanted = packed[choose.choice([0, 0, 1]) if swap else 0]
        while not pool.fits(wanted):
            pool.remove(resident.pop(choose.randrange(len(resident))))
        slot = min(set(range(16)) - {placement.slot for placement in resident})
        placement = pool.place(slot, wanted)
        resident.append(placement)
        copy = placement.copy
        assert copy is not None
        spans = [span for batch in copy.batches() for span in batch]
        if wanted is packed[0]:
            counts.append(len(spans))
        assert max(nbytes for _, _, nbytes in spans) <= page_copy.BATCH_BYTES
        assert_each_page_goes_to_its_place(copy, spans)
    assert counts[0] <= 25 and sum(counts) <= 30 * len(counts) and max(counts) <= 60


def assert_each_page_goes_to_its_place(copy: PageCopy, spans: list[Span]) -> None:
    assert sum(nbytes for _, _, nbytes in spans) == copy.packed.blob.nbytes
    assert [source for source, _, _ in spans] == sorted(source for source, _, _ in spans)
    starts = [source for source, _, _ in spans]
    for page, start in zip(copy.packed.pages, copy.starts, strict=True):
        source, target, _ = spans[bisect_right(starts, page.start) - 1]
        assert target + page.start - source == start
