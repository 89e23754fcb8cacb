"""Processes that may die: started from a server that has torch loaded, heard over a pipe, killed when a case hangs.

Invariant: each named case ends with a line or with the reason why it has none, whatever happens to the process it was in.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, SpawnProcess
from typing import Any

from tests.benchmarks.gpu.faults import LOST_DEVICE_EXIT

PRELOADED = (
    *("torch", "loraplex.engine.engine", "transformers.models.auto.configuration_auto"),
    *("transformers.modeling_rope_utils", "tests.benchmarks.gpu.cases"),
)
"""By the server, once for all; nothing that reads TRITON_INTERPRET or touches a GPU."""
PRELOADED_DRY = tuple(
    f"loraplex.engine.kernels.cpu.{name}"
    for name in ("paged_attention", "quantized_linear", "rms_norm", "rotary", "sgmv", "silu_mul")
)
START_S = 60.0
"""A process may take so long until its first case: the imports, and CUDA's beginnings."""
END_S = 10.0
"""And so long to end: one that waits inside a driver may not end at all."""
MAX_RESTARTS = 12
Line = dict[str, Any]


def forking_context(*, is_dry: bool) -> BaseContext:
    """Children start in milliseconds and hold no GPU of the parent's."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(PRELOADED_DRY if is_dry else ())])
    return context


@dataclass(slots=True)
class Child:
    """One process. `begun` are the cases it began; each may take as long as `limits` says, in seconds."""

    process: Any
    connection: Connection
    limits: Mapping[str, float]
    deadline: float
    begun: list[str] = field(default_factory=list)

    @property
    def current(self) -> str:
        return self.begun[-1] if self.begun else "start of a process"

    def begin(self, name: str) -> None:
        self.begun.append(name)
        self.deadline = time.monotonic() + self.limits[name]


def start(
    context: BaseContext,
    target: Callable[..., None],
    *arguments: Any,
    limits: Mapping[str, float],
    start_s: float = START_S,
) -> Child:
    """`target(connection, *arguments)` in a child that begins cases named in `limits`."""
    receiving, sending = context.Pipe(duplex=False)
    process: SpawnProcess = context.Process(target=target, args=(sending, *arguments))  # type: ignore[attr-defined]
    process.start()
    sending.close()
    return Child(process, receiving, limits, time.monotonic() + start_s)


def lines_of(children: Sequence[Child], until: float = float("inf")) -> Iterator[Line]:
    """What they send, as it comes; for one that dies or is late, a line about what it was at. None lives past `until`,
    nor past the reading of its lines.
    """
    alive = list(children)
    try:
        yield from _lines_of(alive, until)
    finally:
        for child in alive:
            child.process.kill()


def _lines_of(alive: list[Child], until: float) -> Iterator[Line]:
    while alive:
        due = min(until, *(child.deadline for child in alive))
        ready = wait([child.connection for child in alive], timeout=max(0.0, due - time.monotonic()))
        for child in list(alive):
            if child.connection in ready:
                try:
                    kind, content = child.connection.recv()
                except EOFError:
                    alive.remove(child)
                    yield from _ended(child)
                    continue
                if kind == "begin":
                    child.begin(content)
                else:
                    yield content
            elif time.monotonic() > min(until, child.deadline):
                child.process.kill()
                alive.remove(child)
                child.process.join(END_S)
                late = "no time was left" if time.monotonic() > until else "it took longer than its limit"
                yield _failure(child, f"killed: {late}")


def _ended(child: Child) -> Iterator[Line]:
    child.process.join(END_S)
    if child.process.exitcode is None:
        child.process.kill()
        child.process.join(END_S)
    if child.process.exitcode not in (0, LOST_DEVICE_EXIT):
        yield _failure(child, f"the process ended with {child.process.exitcode}")


def _failure(child: Child, error: str) -> Line:
    return {"stage": "run", "case": child.current, "ok": False, "error": error}


@dataclass(slots=True)
class Supervisor:
    """Runs named cases in one process, and in a new one from the next case on when that process ends. Counts those."""

    context: BaseContext
    deadline: float
    restarts: int = 0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(
        self, target: Callable[..., None], *arguments: Any, limits: Mapping[str, float]
    ) -> Iterator[Line]:
        """Lines of `target(connection, *arguments, names)`, begun with the names of `limits` in their order."""
        left, processes = list(limits), 0
        while left and processes <= MAX_RESTARTS and time.monotonic() < self.deadline:
            child = start(self.context, target, *arguments, left, limits=limits)
            yield from lines_of([child], self.deadline)
            processes += 1
            left = [name for name in left if name not in child.begun]
            if not child.begun:
                break
        self.restarts += max(0, processes - 1)
        reason = "no time was left" if time.monotonic() >= self.deadline else "its process could not go on"
        yield from (not_run(name, reason) for name in left)


def not_run(name: str, reason: str) -> Line:
    """The line of a case that was never tried."""
    return {"stage": "run", "case": name, "ok": None, "error": f"not run: {reason}"}
