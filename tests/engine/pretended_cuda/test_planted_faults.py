"""The pretended device finds the faults that it is for: each one is planted in an engine, or in a few lines beside one."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns
from tests.engine.pretended_cuda.engine_runs import (
    ADAPTER_VALUES,
    RandomAdapters,
    Settings,
    adapter_ref,
    config_of,
    request_of,
    save_tiny_model,
)
from tests.engine.pretended_cuda.findings import DeviceError, Findings
from torch import Tensor

from loraplex.engine.batch.host_transfers import HostTransfers, Results
from loraplex.engine.config import LoraConfig
from loraplex.engine.engine import Engine
from loraplex.engine.lora.device_batch import SideStream
from loraplex.engine.lora.memory.page_copy import CudaCopyStream, PageCopy
from loraplex.engine.messages import ProbeReport
from loraplex.engine.model_loading import load_model

if INTERPRETING:
    from tests.engine.pretended_cuda.installation import pretended_cuda

interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter has a process of its own")

SETTINGS = Settings("none", "1", "eager", "penalties", "eviction")
ONE, SEVERAL = ("a0", None), ("a1", "a2", "a3", "a4", "a0")
FETCH, SEND = HostTransfers.fetch, HostTransfers._send
PROBE_LIMIT_S = 60.0


def fetch_after_a_read(self: HostTransfers, tensors: list[Tensor]) -> Results:
    tensors[0].sum().item()
    return FETCH(self, tensors)


def fetch_after_a_number(self: HostTransfers, tensors: list[Tensor]) -> Results:
    values = tensors[0].clone()
    values[torch.zeros(1, dtype=torch.int64, device=values.device)] = 0
    return FETCH(self, tensors)


def send_from_pageable_memory(self: HostTransfers, index: int, buffer: Tensor) -> Tensor:
    return SEND(self, index, buffer.clone())


@contextmanager
def fork_without_waiting(self: SideStream) -> Iterator[None]:
    with torch.cuda.stream(self._stream):
        yield
        self._joined.record(self._stream)


def buffer_without_waiting(self: HostTransfers, index: int, size: int) -> Tensor:
    return self._buffers[index]


FAULTS: dict[str, tuple[Any, str, Any, tuple[str | None, ...], str, str]] = {
    "item": (HostTransfers, "fetch", fetch_after_a_read, ONE, "waits", "_local_scalar_dense"),
    "number of the host": (
        *(HostTransfers, "fetch", fetch_after_a_number, ONE),
        *("waits", "index_put_ of a number of the host"),
    ),
    "copy to pageable memory": (
        *(HostTransfers, "_host", lambda self, size: torch.empty(size, dtype=torch.uint8), ONE),
        *("waits", "copy_ to the host"),
    ),
    "copy from pageable memory": (
        *(HostTransfers, "_send", send_from_pageable_memory, ONE),
        *("waits", "copy_ to the device from pageable memory"),
    ),
    "fork of the side stream": (
        *(SideStream, "fork", fork_without_waiting, ONE),
        *("races", "shrink_tile_kernel on stream"),
    ),
    "join of the side stream": (
        *(SideStream, "join", lambda self: None, ONE),
        *("races", "expand_tile_kernel on stream"),
    ),
    "wait for the results": (
        *(Results, "wait", lambda self: self._tensors, ONE),
        *("races", "tolist on host is not ordered after copy_"),
    ),
    "wait for a buffer's copy": (
        *(HostTransfers, "_buffer", buffer_without_waiting, ONE),
        *("races", "numpy on host is not ordered after copy_"),
    ),
    "wait of a page's copy for kernels": (
        *(CudaCopyStream, "start_after", lambda self, mark: None, SEVERAL),
        *("races", "copy_ on stream"),
    ),
    "wait of kernels for a page's copy": (
        *(PageCopy, "is_done", lambda self: self._last is not None, SEVERAL),
        *("races", "is not ordered after copy_ on stream"),
    ),
}
"""What is replaced by what, whose requests show it, and the finding that names it. What is left behind comes last."""


class Device:
    """One engine on a pretended device, which its faults take turns of."""

    def __init__(self, engine: Engine, findings: Findings) -> None:
        self.engine, self.findings = engine, findings
        self._added = 0

    def run(self, adapters: tuple[str | None, ...]) -> dict[str, list[int]]:
        """One request per adapter; what is found before does not count."""
        self.findings.clear()
        self._added += 1
        for index, adapter in enumerate(adapters):
            sampling = {"max_tokens": 3, "temperature": 0.0, "frequency_penalty": 0.5}
            name = f"{self._added} {index}"
            self.engine.add(request_of(name, [5 + index, 6, 7], adapter, sampling, None))
        found: dict[str, list[int]] = {}
        while self.engine.has_unfinished:
            result = self.engine.step()
            assert not result.failures, result.failures
            for output in result.outputs:
                found.setdefault(output.sequence.request_id, []).append(output.token_id)
            if not result.ran:
                time.sleep(0.001)
        return found


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """Room for two adapters and a half, so that each one evicts another."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("faults") / "tiny"
    save_tiny_model(path)
    lora = LoraConfig(max_bytes=int(2.5 * 4 * ADAPTER_VALUES), host_max_bytes=1 << 20)
    config = replace(config_of(path, SETTINGS, "cuda", "none"), lora=lora)
    with pretended_cuda() as findings:
        engine = Engine(load_model(config), config, RandomAdapters())
        yield Device(engine, findings)
        engine.close()


@interpreted
def test_nothing_is_found_where_nothing_is_planted(device: Device) -> None:
    for adapters in (ONE, SEVERAL):
        assert all(len(tokens) == 3 for tokens in device.run(adapters).values())
        assert device.findings.waits == {} and device.findings.races == {}
    assert device.engine.stats().adapter_evictions > 0


@interpreted
def test_the_numeric_check_is_exact_and_waits_for_nothing(device: Device) -> None:
    device.findings.clear()
    done: Future[ProbeReport] = Future()
    device.engine.numeric_check.start(adapter_ref("a0"), done)
    deadline = time.monotonic() + PROBE_LIMIT_S
    while not done.done() and time.monotonic() < deadline:
        device.engine.step()
        time.sleep(0.001)
    report = done.result(0)
    assert report.finite and report.effect > 0 and max(report.max_error.values()) < report.bound
    # The side thread waits for the figures that it reads; the step loop does not.
    assert [place for _, place in device.findings.waits if "numeric_check" in place] == []
    assert device.findings.races == {}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(device: Device, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, planted, adapters, kind, text = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    device.run(adapters)
    found = getattr(device.findings, kind)
    assert any(text in finding for finding, _ in found), found


@interpreted
def test_tensors_of_the_host_among_those_of_the_device_are_refused(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostTransfers, "stage", lambda self, tensors: list(tensors))
    with pytest.raises(DeviceError, match=r"tensors of the host \[\(1,\)\] among those of cuda:0"):
        device.run((None,))


@interpreted
def test_a_capture_holds_nothing_that_waits_and_no_work_without_a_join() -> None:
    with pretended_cuda() as findings:
        stream, side = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        values = torch.zeros(4, device="cuda")
        for forbidden in (
            lambda: values.sum().item(),
            lambda: values.cpu(),
            lambda: torch.empty(4, pin_memory=True),
            torch.cuda.synchronize,
        ):
            with (
                pytest.raises(DeviceError, match="during a capture"),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
            ):
                forbidden()

        def captured(*, joins: bool, races: bool = False) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    values.add_(1)
                if races:
                    values.add_(0)
                if joins:
                    stream.wait_stream(side)
            return graph

        with pytest.raises(DeviceError, match="does not wait for"):
            captured(joins=False)
        graph = captured(joins=True)
        values.zero_()
        for _ in range(3):
            graph.replay()
        assert values.tolist() == [3.0] * 4 and findings.races == {}
        captured(joins=True, races=True).replay()
        assert [kind.split(" on ")[0] for kind, _ in findings.races] == ["add_"]


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=15)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == len(FAULTS) + 4
