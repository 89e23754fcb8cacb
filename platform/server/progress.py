"""Progress of a start or of other long work on standard error: one line per stage, with a spinner on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

SPINNER_COLUMNS = 3


class Progress:
    """Shows the stages of long work. Call it with the text of each stage as the stage begins.

    On a terminal the current stage has a spinner and becomes a plain line when the next one begins. After `finish`
    every stage is a plain line: a restarted engine reports its stages while the server runs.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._current: str | None = None
        self._status = console.status("starting") if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def __call__(self, stage: str) -> None:
        if self._status is None:
            self._print(stage)
            return
        previous, self._current = self._current, stage
        # A stage wider than the terminal would wrap, and a log line of the engine's process erases one row only.
        self._status.update(escape(stage[: max(0, self._console.width - SPINNER_COLUMNS)]))
        if previous is not None:
            self._print(previous)

    def finish(self) -> None:
        """End the spinner and leave the last stage as a line. Calling `finish` again does nothing."""
        if self._status is None:
            return
        self._status.stop()
        self._status = None
        if self._current is not None:
            self._print(self._current)

    def _print(self, stage: str) -> None:
        self._console.print(escape(stage), highlight=False)


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """Yield a `Progress` on `console`, by default standard error, and finish it on leaving."""
    progress = Progress(console or Console(stderr=True, soft_wrap=True))
    try:
        yield progress
    finally:
        progress.finish()
