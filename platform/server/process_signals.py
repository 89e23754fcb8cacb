"""Signals of a serving process: SIGTERM and SIGINT drain, a second one aborts; during the start the first one cancels it."""

import asyncio
import signal
from dataclasses import dataclass, field

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Shutdown:
    """State that signals change: the first one starts the drain, the second aborts it. During the start, the first cancels it.

    `is_announced`: the drain began with SIGTERM, the signal of supervisors, so a proxy may have to see it first.
    """

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Task[None] | None = None
    is_announced: bool = False

    def install(self) -> None:
        """Handle SIGTERM and SIGINT on the running loop. During the start a signal cancels the current task."""
        self.starting = asyncio.current_task()
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def started(self) -> None:
        """End the start: from now on a signal drains instead of cancelling."""
        self.starting = None

    def _on_signal(self, number: int) -> None:
        self.is_announced = number == signal.SIGTERM
        if self.drain.is_set():
            self.abort.set()
        elif self.starting is not None:
            self.starting.cancel()
        self.drain.set()
