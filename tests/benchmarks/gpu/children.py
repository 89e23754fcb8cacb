"""Processes that may die: started from a server that has torch loaded, heard over a pipe, killed at their deadline."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext, SpawnProcess
from typing import Any

PRELOADED = (
    *("torch", "loraplex.engine.engine", "transformers.models.auto.configuration_auto"),
    *("transformers.modeling_rope_utils", "tests.benchmarks.gpu.cases"),
)
"""By the server, once for all; nothing that reads TRITON_INTERPRET or touches a GPU."""
PRELOADED_DRY = tuple(
    f"loraplex.engine.kernels.cpu.{name}"
    for name in ("paged_attention", "quantized_linear", "rms_norm", "rotary", "sgmv", "silu_mul")
)


def forking_context(*, is_dry: bool) -> BaseContext:
    """Children start in milliseconds and hold no GPU of the parent's."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(PRELOADED_DRY if is_dry else ())])
    return context


@dataclass(slots=True)
class Child:
    """One process. `current` is what it began last, `ended` why it is no more."""

    process: Any
    connection: Connection
    deadline: float
    begun: list[str] = field(default_factory=list)

    @property
    def current(self) -> str:
        return self.begun[-1] if self.begun else ""


def start(context: BaseContext, target: Callable[..., None], *arguments: Any, seconds: float) -> Child:
    """`target(connection, *arguments)` in a child that has `seconds` to live."""
    receiving, sending = context.Pipe(duplex=False)
    process: SpawnProcess = context.Process(target=target, args=(sending, *arguments))  # type: ignore[attr-defined]
    process.start()
    sending.close()
    return Child(process, receiving, time.monotonic() + seconds)


def lines_of(children: list[Child]) -> Iterator[dict[str, Any]]:
    """What they send, as it comes; for one that dies or is late, a line about what it was at."""
    alive = list(children)
    while alive:
        left = max(0.0, min(child.deadline for child in alive) - time.monotonic())
        ready = wait([child.connection for child in alive], timeout=left)
        for child in list(alive):
            if child.connection in ready:
                try:
                    kind, content = child.connection.recv()
                except EOFError:
                    alive.remove(child)
                    yield from _ended(child)
                    continue
                if kind == "begin":
                    child.begun.append(content)
                else:
                    yield content
            elif time.monotonic() > child.deadline:
                child.process.kill()
                alive.remove(child)
                yield _failure(child, "out of time")
                child.process.join()


def _ended(child: Child) -> Iterator[dict[str, Any]]:
    child.process.join()
    if child.process.exitcode:
        yield _failure(child, f"the process ended with {child.process.exitcode}")


def _failure(child: Child, error: str) -> dict[str, Any]:
    return {"stage": "run", "case": child.current, "ok": False, "error": error}
