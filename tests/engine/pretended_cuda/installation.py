"""`pretended_cuda`: within it `torch.cuda` is a device of host memory, and the engine's kernels are interpreted.

Only for a process that Triton interprets. Invariant: at the end everything is as before.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.pretended_cuda import tensors
from tests.engine.pretended_cuda.findings import DeviceError, Findings
from tests.engine.pretended_cuda.launches import interpreted_launches
from tests.engine.pretended_cuda.ordering import Ordering
from tests.engine.pretended_cuda.streams import Event, Graph, Stream, StreamState, in_use
from tests.engine.pretended_cuda.tensors import CudaTensor, DeviceMode, note_host_access
from torch import Tensor

CUDA, META = 1, 14
"""Of `c10::DeviceType`."""
CAPABILITY = (9, 0)
FREE_BYTES, TOTAL_BYTES = 70 << 30, 80 << 30


@contextmanager
def pretended_cuda() -> Iterator[Findings]:
    """One device, and what is found on it."""
    findings = Findings()
    state = StreamState(findings, Ordering(findings))
    lifts = torch._C._only_lift_cpu_tensors()
    with pytest.MonkeyPatch.context() as patch, in_use(state), interpreted_launches(), guarded_cuda():
        _patch_cuda(patch, state)
        _patch_tensors(patch)
        _patch_threads(patch)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with DeviceMode():  # type: ignore[no-untyped-call]
                yield findings
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            tensors.pinned.clear()


@contextmanager
def guarded_cuda() -> Iterator[None]:
    """Let CUDA have the device guard of `meta`, which does nothing: a torch without CUDA refuses its tensors otherwise."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[CUDA] = guards[CUDA], guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before


def _patch_cuda(patch: pytest.MonkeyPatch, state: StreamState) -> None:
    def synchronize(device: object = None) -> None:
        state.host_call("torch.cuda.synchronize")
        state.findings.wait("torch.cuda.synchronize")
        for stream in state.streams:
            state.ordering.host_waited(stream.clock)

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: state.host_call("torch.cuda.empty_cache"),
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": state.on,
        "current_stream": lambda device=None: state.current,
        "CUDAGraph": Graph,
        "graph": lambda graph, pool=None, stream=None, capture_error_mode="global": state.captured(
            graph, stream
        ),
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)


def _patch_tensors(patch: pytest.MonkeyPatch) -> None:
    """What does not pass the dispatcher: pinning, and reading a tensor's memory."""
    numpy, tolist = Tensor.numpy, Tensor.tolist

    def read_numpy(self: Tensor, *args: Any, **options: Any) -> Any:
        if isinstance(self, CudaTensor):
            raise DeviceError("numpy of a tensor of the device")
        # What is written through the array is not seen any more.
        note_host_access(self, "numpy", is_write=True)
        return numpy(self, *args, **options)

    def read_list(self: Tensor) -> Any:
        if isinstance(self, CudaTensor):
            return self.cpu().tolist()
        note_host_access(self, "tolist", is_write=False)
        return tolist(self)

    def pin_memory(self: Tensor, device: object = None) -> Tensor:
        return tensors.pin(self.clone())

    patch.setattr(Tensor, "numpy", read_numpy)
    patch.setattr(Tensor, "tolist", read_list)
    patch.setattr(Tensor, "pin_memory", pin_memory)
    patch.setattr(Tensor, "is_pinned", lambda self, device=None: tensors.is_pinned(self))
    # Its tensors may not be wrapped; without gradients it changes nothing else.
    patch.setattr(torch.inference_mode, "__enter__", lambda self: None)
    patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: None)


def _patch_threads(patch: pytest.MonkeyPatch) -> None:
    """A mode is of one thread; every thread that starts has one of its own."""
    run: Callable[[threading.Thread], None] = threading.Thread.run

    def run_on_device(self: threading.Thread) -> None:
        with DeviceMode():  # type: ignore[no-untyped-call]
            run(self)

    patch.setattr(threading.Thread, "run", run_on_device)
