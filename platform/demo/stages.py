"""Progress of the demo's set-up: a progress bar per stage on a terminal, otherwise one line per stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Stages(Protocol):
    """Consecutive stages of work; beginning a stage ends the previous one."""

    def begin(self, title: str) -> None: ...

    def advance_to(self, fraction: float) -> None:
        """Set the finished share of the current stage, from 0 to 1. Without it the stage's bar pulses."""


@contextmanager
def shown_stages(console: Console) -> Iterator[Stages]:
    """Yield the stages for `console`: bars on a terminal, else lines."""
    if not console.is_terminal:
        yield LineStages(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        stages = BarStages(progress)
        yield stages
        stages.finish()


class LineStages:
    """One line per stage, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str) -> None:
        self._console.print(title, highlight=False, soft_wrap=True)

    def advance_to(self, fraction: float) -> None:
        """Print nothing: logs get no intermediate lines."""


class BarStages:
    """One progress bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, title: str) -> None:
        self.finish()
        self._task = self._progress.add_task(title, total=None)

    def advance_to(self, fraction: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1.0, completed=fraction)

    def finish(self) -> None:
        """Fill the bar of the stage that ran last."""
        self.advance_to(1.0)
