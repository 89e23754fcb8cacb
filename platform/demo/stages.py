"""The child processes that the demo's set-up runs as its stages.

Invariant: a child inherits the lock, so an orphan of a killed server keeps other processes out until it ends.
"""

import subprocess
from collections import deque
from collections.abc import Callable, Sequence

from loraplex.platform.demo.errors import StageFailed
from loraplex.platform.processes.environment import foreign_environment

QUOTED_LINES = 8


def run_stage(
    name: str, command: Sequence[str], lock: int, on_line: Callable[[str], None] | None = None
) -> None:
    """Run `command` to its end. Raises `StageFailed` with its last lines when its exit code is not 0."""
    last_lines: deque[str] = deque(maxlen=QUOTED_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=foreign_environment(),
        pass_fds=(lock,),
    ) as process:
        try:
            for line in process.stdout or ():
                last_lines.append(line.rstrip())
                if on_line is not None:
                    on_line(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise StageFailed("\n".join([f"{name} failed with exit code {process.returncode}:", *last_lines]))
