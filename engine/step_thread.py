"""`StepThread`: the one thread that computes: it loads the model and then runs the step loop.

Invariant: no other thread of the process enters a parallel region with more than itself. OpenMP keeps a team per
thread, and with more team members than cores it stops spinning at barriers: every step then takes half as long again.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class StepThread:
    """Runs calls one after another. A daemon: a call that never returns does not keep the process."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="engine-steps", daemon=True).start()

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Queue a call; the future carries its result or its exception."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run)
        return future

    def _run(self) -> None:
        while True:
            self._calls.get()()
