"""Progress: one line per stage, with a spinner and a bar on a terminal until the work ends."""

import io

from rich.console import Console
from tests.platform.server.terminal import screen_lines

from loraplex.platform.processes.progress import shown_progress


def test_lines_without_a_terminal() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=False)) as progress:
        progress("loading [x]")
        assert [*progress.tracked("sending", {1: 2, 3: 4}.items())] == [(1, 2), (3, 4)]
        progress.finish()
        progress("again")
    assert out.getvalue().splitlines() == ["loading [x]", "sending", "again"]


def test_a_terminal_keeps_one_line_per_stage_and_shows_the_share_that_is_done() -> None:
    out = io.StringIO()
    with shown_progress(Console(file=out, force_terminal=True, color_system=None, width=60)) as progress:
        progress("loading [x]")
        progress("sending " + "a" * 100, 0.5)
        progress("opening")
        progress.finish()
        progress.finish()
        progress("engine ready again")
    sending = "sending " + "a" * 100
    lines = ["loading [x]", sending, "opening", "engine ready again"]
    assert screen_lines(out.getvalue()) == lines
    assert "━" in out.getvalue()
