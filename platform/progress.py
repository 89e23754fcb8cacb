"""How far the start is: a spinner on a terminal, one line per stage otherwise; always on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def shown_progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that announces a stage; safe to call until the process ends."""
    console = Console(stderr=True, soft_wrap=True)

    def announce(stage: str) -> None:
        console.print(f"[dim]·[/dim] {escape(stage)}", highlight=False)

    yield announce
