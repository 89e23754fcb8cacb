"""`gateway-kill`: SIGKILL of a gateway on this machine. Its supervisor starts it again.

Invariant: the process is the one that has a journal of the data directory open, whatever else has its id later.
"""

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import psutil

from loraplex.platform.bench.local_server import is_ready
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.installation import is_alive
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import RequestOutcome

POLL_S: Final = 0.2


@dataclass(slots=True, kw_only=True)
class GatewayKill(Fault):
    """Lasts until every address is ready again, at most `seconds`. `restart`: a command that starts the gateway
    where nothing supervises it; it outlives the drill.
    """

    name: ClassVar[str] = "gateway-kill"
    allowed_errors: ClassVar[frozenset[str]] = frozenset(
        {"no_connection", "connection_lost", "http_502", "http_503", "http_504"}
    )
    charges_all: ClassVar[bool] = False

    restart: str | None
    _gateway: psutil.Process | None = field(default=None, init=False)
    _is_back: bool = field(default=False, init=False)

    async def check(self) -> None:
        found = self.installation.gateways()
        if not found:
            raise DrillImpossible(
                f"no gateway of {self.installation.data_dir} runs on this machine as a process that this user may end"
            )
        self._gateway = found[0]

    def plan(self) -> str:
        gateway = self._gateway
        pid, command = (gateway.pid, " ".join(gateway.cmdline())) if gateway is not None else (0, "")
        again = (
            f"then it runs: {self.restart}"
            if self.restart is not None
            else "starting it again is its supervisor's matter (systemd, Kubernetes); where there is none, start it by hand "
            f"within {self.seconds:g} s, or give --restart COMMAND"
        )
        return (
            f"kill process {pid} ({command[:200]}) with SIGKILL, and with it its engine and the stores that it started. ALL its "
            f"requests break off; {again}."
        )

    async def begin(self) -> None:
        if self._gateway is None:
            raise DrillImpossible("no gateway was found")
        self._gateway.kill()
        while is_alive(self._gateway):
            await asyncio.sleep(POLL_S)
        if self.restart is not None:
            await asyncio.to_thread(start_detached, self.restart)

    async def last(self, outcomes: Sequence[RequestOutcome]) -> None:
        deadline = time.monotonic() + self.seconds
        while not self._is_back and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            ready = [await is_ready(url) for url in self.installation.base_urls]
            self._is_back = all(ready)

    async def promises(self, observed: Observed) -> list[Promise]:
        again = "ready again" if self._is_back else f"not ready after {self.seconds:g} s: start it"
        return [Promise("the gateway serves again", self._is_back, again)]


def start_detached(command: str) -> None:
    """Start a command, without a shell, in a session of its own. Its output goes where errors of this process go."""
    # asyncio would kill it at the end of its event loop.
    arguments = shlex.split(command)
    subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
