"""The stages of the demo's set-up: a progress bar each on a terminal, otherwise a line each; and the child processes that they run.

Invariant: a child inherits the lock, so an orphan of a killed server keeps other processes out until it ends.
"""

import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from loraplex.platform.demo.errors import StageFailed
from loraplex.platform.processes.environment import foreign_environment

QUOTED_LINES = 8


class Stages:
    """Consecutive stages of work; beginning a stage ends the previous one. A `progress` that is disabled shows no bars."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, title: str) -> None:
        if self._progress.disable:
            self._progress.console.print(title, highlight=False, soft_wrap=True)
            return
        self.advance_to(1.0)
        self._task = self._progress.add_task(title, total=None)

    def advance_to(self, fraction: float) -> None:
        """Set the finished share of the current stage, from 0 to 1. Without it the stage's bar pulses."""
        if self._task is not None:
            self._progress.update(self._task, total=1.0, completed=fraction)


@contextmanager
def shown_stages(console: Console) -> Iterator[Stages]:
    """Yield the stages for `console`; at the end the last bar is full."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        stages = Stages(progress)
        yield stages
        stages.advance_to(1.0)


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
