"""What a kind of fault does: to the line of its case, to the process, and to the cases behind it.

Invariant: a fault costs its own case and no other. No case begins on a device that a case before it has left broken.
"""

import gc
import os
import traceback
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol

import torch
from tests.benchmarks.gpu.children import LOST_DEVICE_EXIT

MAX_ERROR = 600


class Fault(Enum):
    """`FAILED` and `OUT_OF_MEMORY` fail the case, `NOT_INSTALLED` leaves it unmeasured, `DEVICE_LOST` ends the process too."""

    FAILED = "failed"
    NOT_INSTALLED = "not installed"
    OUT_OF_MEMORY = "out of memory"
    DEVICE_LOST = "device lost"


class Lines(Protocol):
    """Where lines go, one at a time."""

    def line(self, line: dict[str, Any]) -> None: ...


def attempt(
    results: Lines, head: dict[str, Any], work: Iterable[dict[str, Any]], device: torch.device
) -> None:
    """Send the lines of `work`, and a last one if it raises. Ends this process if its device is lost."""
    fault = None
    try:
        for line in work:
            results.line(line)
        synchronize(device)
    except Exception as error:  # noqa: BLE001 - written down as this case's result
        fault = fault_of(error, device)
        ok = None if fault is Fault.NOT_INSTALLED else False
        results.line(head | {"ok": ok, "error": described(error, fault)})
    if fault is Fault.DEVICE_LOST:
        # A lost context fails every later call, also those of an orderly exit.
        os._exit(LOST_DEVICE_EXIT)
    if fault is not None and device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def fault_of(error: Exception, device: torch.device) -> Fault:
    """The kind of an exception, found out by asking the device: texts of errors differ between libraries."""
    if isinstance(error, ModuleNotFoundError):
        return Fault.NOT_INSTALLED
    if not answers(device):
        return Fault.DEVICE_LOST
    return Fault.OUT_OF_MEMORY if isinstance(error, torch.OutOfMemoryError) else Fault.FAILED


def answers(device: torch.device) -> bool:
    """Whether the device still takes calls: after an illegal access no call of its context succeeds."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


def synchronize(device: torch.device) -> None:
    """Wait for all launched work, and raise what went wrong in it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def described(error: Exception, fault: Fault) -> str:
    """The kind, the exception, where it was raised and what it says."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{os.path.basename(last.filename)}:{last.lineno}"
    return f"{fault.value}: {type(error).__name__} at {place}: {error}"[:MAX_ERROR]
