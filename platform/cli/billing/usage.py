"""`loraplex usage`: the rows of the ledger for anyone who recomputes a bill, and a comparison of all that is summed from them.

Invariant: both only read. Amounts are whole pico-units of money, never rounded.
"""

import csv
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TextIO
from uuid import UUID

import typer

from loraplex.platform.cli.command_context import (
    DataDir,
    async_command,
    open_command_stores,
    open_tenant_command,
)
from loraplex.platform.cli.output import AsJson, print_rows
from loraplex.platform.web.responses import csv_text
from loraplex.tenants.admission.counter_drift import compare_all_counters
from loraplex.tenants.ledger.drift import Comparison, compare_ledger
from loraplex.tenants.ledger.usage_export import COLUMNS, TEXTS, exported_rows
from loraplex.tenants.rfc3339 import utc_text

app = typer.Typer(
    name="usage", help="The usage ledger: export it, and compare its sums.", no_args_is_help=True
)

TenantName = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]
Month = Annotated[
    str, typer.Option("--month", help="The month of the requests' admission, as 2026-11 (UTC).")
]
Form = Annotated[Literal["csv", "jsonl"], typer.Option("--format", help="CSV, or one JSON object per line.")]
Output = Annotated[Path | None, typer.Option("--output", help="A new file; without it, standard output.")]
MONTH: Final = re.compile(r"20[0-9]{2}-(0[1-9]|1[0-2])")
COMPARED: Final = ("compared", "from", "to", "sums", "differing", "drift_pico")


@app.command()
@async_command
async def export(
    tenant: TenantName,
    month: Month,
    form: Form = "csv",
    output: Output = None,
    data_dir: DataDir = None,
) -> None:
    """Write every row of the ledger for one tenant and month, with all that its amount follows from.

    In CSV, an apostrophe stands before what a spreadsheet would compute in a text of the client.
    """
    if not MONTH.fullmatch(month):
        raise typer.BadParameter(f"--month {month[:20]}: write YEAR-MONTH, as 2026-11")
    if output is not None and output.exists():
        raise typer.BadParameter(f"--output {output}: the file exists already")
    async with open_tenant_command(tenant, data_dir) as command, command.query() as session:
        with nullcontext(sys.stdout) if output is None else output.open("x", newline="") as file:
            await write_rows(file, form, exported_rows(session, command.tenant_id, f"m:{month}"))


async def write_rows(file: TextIO, form: str, rows: AsyncIterator[dict[str, Any]]) -> None:
    """Write rows as they come."""
    writer = csv.DictWriter(file, COLUMNS)
    if form == "csv":
        writer.writeheader()
    async for row in rows:
        document = {name: written(value) for name, value in row.items()}
        if form == "jsonl":
            file.write(json.dumps(document) + "\n")
        else:
            writer.writerow({**document, **{name: csv_text(document[name]) for name in TEXTS}})


def written(value: Any) -> Any:
    """Times in RFC 3339 (UTC), ids as text, numbers as they are."""
    if isinstance(value, datetime):
        return utc_text(value)
    return str(value) if isinstance(value, UUID) else value


@app.command()
@async_command
async def reconcile(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Compare the ledger with the rollups, the totals, final invoices and the quota counters. Exit code 1 if anything differs.

    Nothing is changed. A difference of the counters counts if it stays the same for five seconds.
    """
    found: list[Comparison] = []
    async with open_command_stores(data_dir) as stores:
        found.extend(await compare_ledger(stores.database))
        if stores.redis_url is None:
            typer.echo("counters: not compared, since no Valkey is configured or runs here", err=True)
        else:
            found.append(await compare_all_counters(stores.database, stores.redis_url))
    report(found, as_json)
    if any(each.differing for each in found):
        raise typer.Exit(1)


def report(found: Sequence[Comparison], as_json: bool) -> None:
    """Print what was compared, then each difference: on standard error for people."""
    rows = [comparison_row(each) for each in found]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    print_rows(rows, False, COMPARED)
    for row in rows:
        for named in row["differences"]:
            typer.echo(f"{row['compared']}: {named}", err=True)


def comparison_row(found: Comparison) -> dict[str, Any]:
    start, end = (time.isoformat(timespec="seconds") for time in (found.part.start, found.part.end))
    return {
        "compared": found.part.store,
        "from": start,
        "to": end,
        "sums": found.sums,
        "differing": found.differing,
        "drift_pico": found.drift_pico,
        "differences": found.named,
    }
