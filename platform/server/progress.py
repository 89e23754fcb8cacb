"""How far the start is: a spinner on a terminal, one line per stage otherwise; always on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


class Progress:
    """Call it with each stage. After `finish` stages are plain lines, as a restarted engine's are."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting") if console.is_terminal else None
        if self._status is not None:
            self._status.start()

    def __call__(self, stage: str) -> None:
        if self._status is not None:
            self._status.update(escape(stage))
        else:
            self._console.print(escape(stage), highlight=False)

    def finish(self) -> None:
        """End the spinner; harmless when called again."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextmanager
def shown_progress(console: Console | None = None) -> Iterator[Progress]:
    """Progress on `console`, by default standard error, finished at the latest on leaving."""
    progress = Progress(console or Console(stderr=True, soft_wrap=True))
    try:
        yield progress
    finally:
        progress.finish()
