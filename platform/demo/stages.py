"""Tells a person how far long work is: a rich progress bar on a terminal, otherwise one line per stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Stages(Protocol):
    """Work in consecutive stages; starting one ends the one before."""

    def begin(self, title: str) -> None: ...

    def advance_to(self, fraction: float) -> None:
        """How much of the current stage is done, from 0 to 1. A stage that never tells pulses."""


@contextmanager
def shown_stages(console: Console) -> Iterator[Stages]:
    """Stages on `console`, in the form that fits it."""
    if not console.is_terminal:
        yield LineStages(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        stages = BarStages(progress)
        yield stages
        stages.finish()


class LineStages:
    """One line per stage: logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str) -> None:
        self._console.print(title, highlight=False, soft_wrap=True)

    def advance_to(self, fraction: float) -> None:
        """Nothing: a log gets no intermediate lines."""


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
