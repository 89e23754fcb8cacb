"""`loraplex doctor`: can loraplex serve here? Exit code 1 when something it needs is missing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex.platform.cli.command_context import exit_codes
from loraplex.platform.cli.environment_checks import CHECKS, Check
from loraplex.platform.config import load_settings

COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


app = typer.Typer(add_completion=False)


@app.command()
def doctor(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine: Python, torch, GPU, memory, disk, data directory, PostgreSQL, Valkey and what validates uploads."""
    with exit_codes():
        settings = load_settings({"data_dir": data_dir})
    checks = [check(settings) for check in CHECKS]
    print_checks(checks, as_json)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(1)


def print_checks(checks: list[Check], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
        return
    table = Table("check", "status", "detail")
    for check in checks:
        table.add_row(check.name, f"[{COLOURS[check.status]}]{check.status}[/]", escape(check.detail))
    Console().print(table)
