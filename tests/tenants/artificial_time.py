"""An event loop whose clock jumps to the next timer: a busy machine does not disturb tests of times."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ArtificialLoop(asyncio.SelectorEventLoop):
    """`now` is its time in seconds; a callback that adds to it blocks the loop for so long."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: ArtificialLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits really only where no timer is set."""
        found = super().select(0 if timeout is not None else None)
        if not found and timeout is not None:
            self._loop.now += max(0.0, timeout)
        return found


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=ArtificialLoop) as runner:
        return runner.run(work)


def running_loop() -> ArtificialLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ArtificialLoop)
    return loop
