"""`python -m tests.runbooks provoke NAME`: brings a situation about, prints what an on-call person has, and keeps it going."""

import shlex
import signal
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer
from tests.runbooks.situations import SITUATIONS

from loraplex.platform.demo.model import ensure_demo_model

CACHE = Path(__file__).resolve().parents[2] / ".loraplex-test"

app = typer.Typer(help="Situations of deploy/guide/runbooks.md.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_situations() -> None:
    """Print the names, as the page's sections have them."""
    typer.echo("\n".join(SITUATIONS))


@app.command()
def provoke(name: Annotated[str, typer.Argument(help="A name of `list`.")]) -> None:
    """Keep a situation going until Ctrl-C. What is printed says what was reported, not why."""
    if name not in SITUATIONS:
        raise typer.BadParameter(f"one of {', '.join(SITUATIONS)}")
    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell that starts it in the background has Ctrl-C ignored.
        signal.signal(number, signal.default_int_handler)
    model = ensure_demo_model(CACHE)
    with (
        # The stores that a killed server leaves write for a moment more.
        tempfile.TemporaryDirectory(prefix="loraplex-runbook-", ignore_cleanup_errors=True) as folder,
        SITUATIONS[name](Path(folder), model) as provoked,
    ):
        typer.echo(f'{provoked.tenant} says: "{provoked.said}"\n')
        for variable, value in provoked.variables().items():
            typer.echo(f"export {variable}={shlex.quote(value)}")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            typer.echo("ending", err=True)


if __name__ == "__main__":
    app()
