"""`engine-kill` and `engine-hang`: an engine process ends at once, or stops and answers nothing.

Invariant: the gateway's own watchdog replaces it; this drill starts no engine.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import psutil

from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.installation import is_alive
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import RequestOutcome
from loraplex.platform.drills.undo import ContinueProcess
from loraplex.platform.engines.process import WatchdogConfig

POLL_S: Final = 0.1
UNRESPONSIVE_S: Final = WatchdogConfig().unresponsive_s
LONGEST_LOSS_S: Final = UNRESPONSIVE_S + 15.0
"""When the watchdog of the gateway must have replaced an engine that answers nothing: pings are a second apart, and machines are
busy."""


@dataclass(slots=True, kw_only=True)
class EngineLoss(Fault):
    """Lasts until the process is gone, at most `seconds`."""

    allowed_errors: ClassVar[frozenset[str]] = frozenset({"engine_unavailable", "overloaded"})

    seconds: float = LONGEST_LOSS_S
    _before: list[psutil.Process] = field(default_factory=list, init=False)

    async def check(self) -> None:
        found = self.installation.engines()
        if not found:
            raise DrillImpossible(
                f"no engine of {self.installation.data_dir} runs on this machine as a process that this user may end"
            )
        self._before = found

    @property
    def engine(self) -> psutil.Process:
        """The process. Raises `DrillImpossible` before `check`."""
        if not self._before:
            raise DrillImpossible("no engine was found")
        return self._before[0]

    async def last(self, outcomes: Sequence[RequestOutcome]) -> None:
        deadline = time.monotonic() + self.seconds
        while is_alive(self.engine) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def promises(self, observed: Observed) -> list[Promise]:
        others = [each for each in self.installation.engines() if each not in self._before and is_alive(each)]
        found = f"process {others[0].pid}" if others else "none was started"
        return [Promise("another engine process takes its place", bool(others), found)]


class EngineKill(EngineLoss):
    """The engine ends with SIGKILL."""

    name: ClassVar[str] = "engine-kill"

    def plan(self) -> str:
        return (
            f"kill the engine, process {self.engine.pid}, with SIGKILL. The streams in progress of ALL tenants end with an error "
            "and are charged for the tokens that were delivered; the gateway starts another engine, which loads the model."
        )

    async def begin(self) -> None:
        self.engine.kill()


class EngineHang(EngineLoss):
    """The engine stops with SIGSTOP, until the watchdog of its gateway kills it."""

    name: ClassVar[str] = "engine-hang"

    def plan(self) -> str:
        return (
            f"stop the engine, process {self.engine.pid}, with SIGSTOP. The gateway's watchdog kills it once it was silent for "
            f"{UNRESPONSIVE_S:g} s, and starts another one. Until then ALL requests wait; then the streams in "
            "progress end with an error and are charged for the tokens that were delivered."
        )

    def undo(self) -> ContinueProcess:
        return ContinueProcess(self.engine.pid, self.engine.create_time())

    async def begin(self) -> None:
        self.engine.suspend()
