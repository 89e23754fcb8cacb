"""Output of commands: JSON for programs, tables for people.

Invariant: with `--json` only JSON reaches standard output.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from loraplex.platform.web.console.formatting import ago, short_digest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PIPED_WIDTH: Final = 1000
"""Without a terminal each row is one line, which programs can search."""


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
    print_for_people(table)


def print_rows(rows: Sequence[Mapping[str, Any]], as_json: bool, columns: Sequence[str]) -> None:
    """Print one table row per document; an empty table has the headings `columns` too.

    People get the beginning of a digest and how long ago a time was; `--json` has both in full, and every column.
    """
    if as_json:
        typer.echo(json.dumps(rows))
        return
    # A column in which no row has anything takes room of those that have.
    shown = [name for name in columns if not rows or any(not is_empty(row[name]) for row in rows)]
    table = table_of(*shown)
    for row in rows:
        table.add_row(*(cell(brief(name, row[name])) for name in shown))
    print_for_people(table)


def print_table(document: object, as_json: bool, table: Table | str) -> None:
    """Print a document as JSON, or the table or line of it for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_for_people(table)


def is_empty(value: Any) -> bool:
    return value is None or value is False or value == []


def table_of(*columns: str) -> Table:
    """Return an empty table, whose first column is never broken."""
    headings = (name.removesuffix("_at").replace("_", " ") for name in columns)
    return Table(
        *(Column(name, no_wrap=not index, overflow="fold") for index, name in enumerate(headings)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def print_for_people(table: Table | str) -> None:
    """Print on standard output; a terminal wraps what is too wide for it."""
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)


def brief(column: str, value: Any) -> Any:
    """Shorten a digest as the console does, and write a time relative to now. The name of the column says which it is."""
    if value is not None and (column.endswith(("_at", "_from")) or column in ("from", "to")):
        return ago(datetime.fromisoformat(value))
    return short_digest(value) if column == "digest" else value


def times_of(row: object, names: Sequence[str], timespec: str = "auto") -> dict[str, str | None]:
    """Return the times of a row by name, in ISO 8601; None for one that it has not."""
    times = {name: getattr(row, name) for name in names}
    return {name: None if time is None else time.isoformat(timespec=timespec) for name, time in times.items()}


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(map(str, value))) or "-"
    return escape(str(value))
