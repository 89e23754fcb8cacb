"""Copies on a side stream: paced by layers, after previously launched work; an adapter has arrived with its last byte."""

import threading
from collections.abc import Iterable

import pytest
import torch
from tests.engine.lora.driven_pool import CPU, DrivenPool, Source, paged, ref
from torch import Tensor

from loraplex.engine.lora.memory.device_memory import DeviceAdapterMemory
from loraplex.engine.lora.memory.host_cache import HostCache
from loraplex.engine.lora.memory.page_copy import (
    LAYERS_IN_FLIGHT,
    CopyThread,
    ImmediateStream,
    Mark,
    PageCopier,
    PageCopy,
    Span,
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


def test_few_layers_are_in_flight_at_once_and_the_last_one_arrives() -> None:
    stream = Stream()
    pool, started = made(stream)
    placement = pool.place(0, pool.pack(adapter()))
    assert stream.log == ["computed"] and not pool.is_there(placement)
    with pytest.raises(RuntimeError, match="before it has come"):
        pool.install(placement)
    PageCopier(stream).copy(started[0])
    assert stream.log[1] == "follow", "not before the kernels that may still read these pages"
    assert stream.log.count("mark") == LAYERS
    assert stream.most_in_flight == LAYERS_IN_FLIGHT and stream.waits == LAYERS - LAYERS_IN_FLIGHT
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
    copies = CopyThread(PageCopier(stream))
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
    copies = CopyThread(PageCopier(stream))
    pool, started = made(stream)
    placement = pool.place(0, pool.pack(adapter()))
    copies.start(started[0])
    copies.close()
    with pytest.raises(RuntimeError, match="could not be copied"):
        pool.is_there(placement)
