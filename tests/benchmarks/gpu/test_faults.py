"""What an exception does to its case and its process; the device is asked, whatever the exception says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.benchmarks.gpu.children import LOST_DEVICE_EXIT
from tests.benchmarks.gpu.faults import MAX_ERROR, Fault, attempt, fault_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Kept:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)


class Exited(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A CUDA device that is lost once a test says so."""
    state = {"lost": False, "emptied": False}

    def synchronize(device: torch.device) -> None:
        if state["lost"]:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def leave(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state.update(emptied=True))
    monkeypatch.setattr("os._exit", leave)
    return state


def raising(error: Exception) -> Iterator[dict[str, Any]]:
    yield {"case": "x", "ok": True}
    raise error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError("no such tile"), Fault.FAILED),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Fault.FAILED),
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), Fault.OUT_OF_MEMORY),
        (ModuleNotFoundError("No module named 'humming'"), Fault.NOT_INSTALLED),
    ],
)
def test_a_device_that_answers_is_not_lost(error: Exception, fault: Fault, device: dict[str, bool]) -> None:
    assert fault_of(error, CUDA) is fault
    kept = Kept()
    attempt(kept, {"case": "x"}, raising(error), CUDA)
    assert [line["ok"] for line in kept.lines] == [True, None if fault is Fault.NOT_INSTALLED else False]
    assert kept.lines[-1]["error"].startswith(f"{fault.value}: {type(error).__name__} at test_faults.py:")
    assert device["emptied"]


def test_a_lost_device_ends_the_process_behind_its_line(device: dict[str, bool]) -> None:
    device["lost"] = True
    kept = Kept()
    with pytest.raises(Exited) as exited:
        attempt(kept, {"case": "x"}, raising(ValueError("any")), CUDA)
    assert exited.value.args == (LOST_DEVICE_EXIT,)
    assert kept.lines[-1]["ok"] is False and kept.lines[-1]["error"].startswith("device lost: ValueError")
    assert not device["emptied"]


def test_what_shows_only_when_the_device_is_waited_for_is_the_cases_own(device: dict[str, bool]) -> None:
    def launches() -> Iterator[dict[str, Any]]:
        yield {"case": "x", "ok": True}
        device["lost"] = True

    kept = Kept()
    with pytest.raises(Exited):
        attempt(kept, {"case": "x"}, launches(), CUDA)
    assert kept.lines[-1]["error"].startswith("device lost: AcceleratorError")


def test_texts_of_errors_are_short() -> None:
    kept = Kept()
    attempt(kept, {"case": "x"}, raising(ValueError("x" * 5000)), CPU)
    assert len(kept.lines[-1]["error"]) == MAX_ERROR
