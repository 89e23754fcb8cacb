"""What the pretended device found: what would raise on a GPU raises here, and what would wait or race is written down.

Invariant: a finding names the engine's own lines, innermost first, so that it can be fixed or allowed by line.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field

PLACES = 3


class DeviceError(RuntimeError):
    """A call that a GPU refuses: tensors of two devices in one operation, or an operation that no capture may hold."""


@dataclass(slots=True)
class Findings:
    """Counts by place. `waits` make the host wait for the device; `races` are accesses that nothing orders."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    races: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: int = 0

    def wait(self, kind: str) -> None:
        self.waits[kind, place()] += 1

    def race(self, kind: str) -> None:
        self.races[kind, place()] += 1

    def clear(self) -> None:
        self.waits.clear()
        self.races.clear()


def place() -> str:
    """The innermost lines of the engine that this call comes from."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < PLACES:
        _, inside, name = frame.f_code.co_filename.rpartition("/loraplex/engine/")
        if inside:
            found.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "outside the engine"
