"""The commands with millions of rows in a PostgreSQL of its own."""

from typing import Annotated

import typer
import uvloop
from tests.benchmarks.console import measure_console
from tests.benchmarks.ledger import LedgerLoad, measure_ledger
from tests.benchmarks.ledger_rows import LedgerShape

from loraplex.platform.cli.bench import AsJson, Out, run_bench


def ledger(
    rows: Annotated[int, typer.Option(min=1000, help="Rows to load.")] = 5_000_000,
    months: Annotated[int, typer.Option(min=4, max=24, help="Over which they are spread.")] = 6,
    rate: Annotated[float, typer.Option(min=1.0, help="Settled rows per second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each load.")] = 20.0,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """A usage query, a dropped month and settlements with millions of rows in a PostgreSQL of its own."""
    shape, load = LedgerShape(rows=rows, months=months), LedgerLoad(rate=rate, seconds=seconds)
    run_bench(lambda progress: measure_ledger(shape, load, progress), out, as_json, uvloop.new_event_loop)


def console(
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the ledger.")] = 5_000_000,
    months: Annotated[int, typer.Option(min=4, max=24, help="Over which they are spread.")] = 6,
    tenants: Annotated[int, typer.Option(min=1, help="The first has a fifth of the rows.")] = 20,
    views: Annotated[int, typer.Option(min=2, help="Of each page.")] = 30,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Server time, statements and first load of each page of the console with millions of rows, in stores of its own."""
    shape = LedgerShape(rows=rows, months=months, tenants=tenants)
    run_bench(lambda progress: measure_console(shape, views, progress), out, as_json, uvloop.new_event_loop)
