"""A terminal sees a bar, a log one line per stage."""

import io

from rich.console import Console

from loraplex.platform.demo.stages import shown_stages


def run_two_stages(console: Console) -> None:
    with shown_stages(console) as stages:
        stages.begin("downloading")
        stages.advance_to(0.5)
        stages.begin("converting")


def test_a_log_gets_one_line_per_stage() -> None:
    out = io.StringIO()
    run_two_stages(Console(file=out, force_terminal=False))
    assert out.getvalue() == "downloading\nconverting\n"


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    run_two_stages(Console(file=out, force_terminal=True, width=80))
    assert "downloading" in out.getvalue()
    assert "━" in out.getvalue()
