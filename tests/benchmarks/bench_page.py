"""`loraplex bench report`: the result lines of a folder as one page that needs nothing beside itself."""

from pathlib import Path
from typing import Annotated

import typer

from loraplex.platform.bench.report import RESULTS, checkout_root
from loraplex.platform.cli.bench_running import say
from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.startup_errors import SettingsError

PAGE = Path("deploy", "benchmarks.html")


def page(
    results: Annotated[
        Path | None, typer.Option(help="Folder of JSON lines; default tests/benchmarks/results.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help=f"The page; default {PAGE} of a checkout.")] = None,
) -> None:
    """Render the result lines as one HTML page, with rooflines."""
    from tests.benchmarks.results_page import read_lines, render

    root = checkout_root()
    with exit_codes():
        if root is None and (results is None or to is None):
            raise SettingsError("outside a checkout --results and --to are needed")
        folder, target = results or Path(root or "", RESULTS), to or Path(root or "", PAGE)
        lines = read_lines(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(lines), encoding="utf-8")
    say(f"wrote {target}: {len(lines)} lines of {folder}")
