"""Progress: one line per stage where there is no terminal, a spinner that ends where there is one."""

import io

from rich.console import Console

from loraplex.platform.server.progress import shown_progress


def test_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=False)) as progress:
        progress("loading [x]")
        progress.finish()
        progress("again")
    assert out.getvalue().splitlines() == ["loading [x]", "again"]


def test_a_terminal_shows_the_stage_and_lines_after_the_end() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=True)) as progress:
        progress("loading")
        progress.finish()
        progress.finish()
        progress("engine ready again")
    assert out.getvalue().rstrip().endswith("engine ready again")
