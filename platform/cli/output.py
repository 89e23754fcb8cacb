"""Output of commands: JSON for programs, tables for people.

Invariant: with `--json` only JSON reaches standard output.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_key(plaintext: str, as_json: bool) -> None:
    """Print only the key on standard output, so that `KEY=$(loraplex …)` works."""
    typer.echo(json.dumps({"api_key": plaintext}) if as_json else plaintext)
    if not as_json:
        typer.echo("Keep this key now: it is shown once and cannot be read again.", err=True)


def print_document(document: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document))
        return
    table = Table(show_header=False, box=None)
    for name, value in document.items():
        table.add_row(name, cell(value))
    Console().print(table)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, columns: Sequence[str]) -> None:
    """Print one table row per document; an empty table has the headings `columns` too."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(*(Column(name, no_wrap=name == columns[0], overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(cell(row[column]) for column in columns))
    Console().print(table)


def print_table(document: object, as_json: bool, table: Table | str) -> None:
    """Print a document as JSON, or the table or line of it for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        Console().print(table)


def times_of(row: object, names: Sequence[str], timespec: str = "auto") -> dict[str, str | None]:
    """Return the times of a row by name, in ISO 8601; None for one that it has not."""
    times = {name: getattr(row, name) for name in names}
    return {name: None if time is None else time.isoformat(timespec=timespec) for name, time in times.items()}


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return escape(", ".join(map(str, value))) or "-"
    return escape(str(value))
