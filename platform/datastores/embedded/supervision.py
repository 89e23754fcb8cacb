"""Checks the embedded servers on a thread of its own and repairs them with growing delays.

Invariant: it repairs as often as `REPAIRS` allows; then it gives up and says why, so that the process ends and its
supervisor starts it again.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import structlog

from loraplex.platform.datastores.embedded.errors import EmbeddedError
from loraplex.platform.processes.restart_budget import RestartBudget, RestartPolicy

LOG = structlog.get_logger("loraplex.embedded")

CHECK_SECONDS: Final = 0.2
REPAIRS: Final = RestartPolicy(first_delay_s=0.2, max_delay_s=10.0, max_restarts=8, is_first_immediate=True)


class Supervision:
    """`ailing` returns what is wrong, if anything; `repair` raises `EmbeddedError` when it fails, and is tried again.

    `lost` gets the reason when no further repair is tried.
    """

    def __init__(self, ailing: Callable[[], str | None], repair: Callable[[], None]) -> None:
        self.lost: Future[str] = Future()
        self._ailing = ailing
        self._repair = repair
        self._budget = RestartBudget(REPAIRS)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embedded-supervision", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return after the last check or repair. May be called without `start`."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        failed = None
        while not self._stopping.wait(CHECK_SECONDS):
            reason = failed or self._reason()
            if reason is None:
                continue
            delay = self._budget.next_delay(time.monotonic())
            if delay is None:
                LOG.error("the embedded servers are given up", reason=reason)
                self.lost.set_result(reason)
                return
            LOG.warning("starting embedded servers", reason=reason, delay_s=delay)
            if not self._stopping.wait(delay):
                failed = self._try_repair()

    def _reason(self) -> str | None:
        try:
            return self._ailing()
        except (EmbeddedError, OSError) as error:
            return str(error)

    def _try_repair(self) -> str | None:
        """Return why the repair failed; None if it succeeded."""
        try:
            self._repair()
        except (EmbeddedError, OSError) as error:
            return str(error)
        except Exception as error:
            # Logged; an unexpected error is one more failed repair, and must not end the supervision unnoticed.
            LOG.exception("starting embedded servers failed")
            return f"{type(error).__name__}: {error}"
        LOG.info("the embedded servers run again")
        return None
