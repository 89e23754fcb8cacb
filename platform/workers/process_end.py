"""How a worker process ended, from its exit code."""

import signal
from typing import Final

from loraplex.platform.workers.task import How

MEMORY_STATUS: Final = 71
"""The exit code of a worker that could not allocate memory."""
UNCONFINED_STATUS: Final = 69
"""The exit code of a fork that the system did not confine; it has read no payload."""
BROKEN_STATUS: Final = 70


def how_it_ended(exit_code: int) -> How:
    """Return why a process ended without a reply. A library that cannot allocate may abort; the kernel kills when memory runs out."""
    if exit_code == -signal.SIGXCPU:
        return "cpu"
    return "memory" if exit_code in (-signal.SIGABRT, -signal.SIGKILL, MEMORY_STATUS) else "crashed"
