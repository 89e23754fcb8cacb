"""Progress: one line per stage, with a spinner on a terminal until the work ends."""

import io

from rich.console import Console
from tests.platform.server.terminal import screen_lines

from loraplex.platform.server.progress import shown_progress


def test_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=False)) as progress:
        progress("loading [x]")
        progress.finish()
        progress("again")
    assert out.getvalue().splitlines() == ["loading [x]", "again"]


def test_a_terminal_keeps_one_line_per_stage() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=True, color_system=None)) as progress:
        progress("loading [x]")
        progress("opening")
        progress.finish()
        progress.finish()
        progress("engine ready again")
    assert screen_lines(out.getvalue()) == ["loading [x]", "opening", "engine ready again"]
