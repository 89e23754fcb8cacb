"""Progress of a start or of other long work on standard error: one line per stage; on a terminal also a spinner, a bar and the time.

Invariant: what moves is one row, so that a log line of another process, which erases one row, leaves nothing of it behind.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Item = TypeVar("Item")


class Progress:
    """Shows the stages of long work. Call it with the text of each stage as the stage begins, and again with the share that is done.

    On a terminal the current stage has a spinner and becomes a plain line when the next one begins. After `finish`
    every stage is a plain line: a restarted engine reports its stages while the server runs.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._current: str | None = None
        columns = (
            *(SpinnerColumn(), TextColumn("{task.description}", markup=False)),
            *(BarColumn(bar_width=24), TimeElapsedColumn()),
        )
        # Few frames a second: a load generator shares its cores with the server that it measures.
        self._bars = Bars(*columns, console=console, transient=True, refresh_per_second=4)
        self._is_live = console.is_terminal

    def __call__(self, stage: str, share: float | None = None) -> None:
        """Begin a stage. With `share`, from 0 to 1: how much of it is done; without one the bar of a terminal pulses."""
        if share is None or stage != self._current:
            self._begin(stage)
        if share is not None and self._bars.tasks:
            self._bars.update(self._bars.tasks[0].id, total=1.0, completed=share)

    def tracked(self, stage: str, items: Collection[Item]) -> Iterator[Item]:
        """Yield the items of a loop, and show how many are done."""
        for done, item in enumerate(items):
            self(stage, done / len(items))
            yield item

    def _begin(self, stage: str) -> None:
        previous, self._current = self._current, stage
        if not self._is_live:
            self._print(stage)
            return
        self._end_row(previous)
        self._bars.add_task(stage, total=None)
        self._bars.start()

    def finish(self) -> None:
        """End the spinner and leave the last stage as a line. Calling `finish` again does nothing."""
        if self._is_live:
            self._is_live = False
            self._end_row(self._current)
            self._bars.stop()

    def _end_row(self, stage: str | None) -> None:
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        if stage is not None:
            self._print(stage)

    def _print(self, stage: str) -> None:
        self._console.print(escape(stage), highlight=False, soft_wrap=True)


SILENT: Final = Progress(Console(quiet=True, force_terminal=False))


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """Yield a `Progress` on `console`, by default standard error, and finish it on leaving."""
    progress = Progress(console or Console(stderr=True))
    try:
        yield progress
    finally:
        progress.finish()
