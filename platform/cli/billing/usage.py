"""`loraplex usage`: the rows of the ledger for anyone who recomputes a bill, and a comparison of all that is summed from them.

Invariant: both only read. Amounts are whole pico-units of money, never rounded.
"""

import csv
import json
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TextIO
from uuid import UUID

import typer

from loraplex.platform.cli.command_context import (
    DataDir,
    open_command_stores,
    open_tenant_command,
    run_command,
)
from loraplex.platform.cli.output import AsJson, print_rows
from loraplex.tenants.admission.counter_drift import counted_tenants, counter_drifts
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.drift import (
    DAY,
    Comparison,
    all_ranges,
    compare,
    first_comparable,
    first_summed,
    monthly_ranges,
)
from loraplex.tenants.ledger.usage_export import COLUMNS, TEXTS, exported_rows
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.periods import period_start, periods_of
from loraplex.tenants.rfc3339 import utc_text
from loraplex.tenants.valkey import open_valkey

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
# What a spreadsheet would compute (OWASP, "CSV injection").
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
APART_S: Final = 5.0
"""Between the two comparisons of counters that differ."""
SUMS: Final = ("rollups", "monthly_rollups", "totals", "invoices")
COMPARED: Final = ("compared", "from", "to", "sums", "differing", "drift_pico")


@app.command()
def export(
    tenant: TenantName,
    month: Month,
    form: Form = "csv",
    output: Output = None,
    data_dir: DataDir = None,
) -> None:
    """Write every row of the ledger for one tenant and month, with all that its amount follows from.

    In CSV, a text of the client that a spreadsheet would compute begins with an apostrophe.
    """
    if not MONTH.fullmatch(month):
        raise typer.BadParameter(f"--month {month[:20]}: write YEAR-MONTH, as 2026-11")
    if output is not None and output.exists():
        raise typer.BadParameter(f"--output {output}: the file exists already")

    async def work() -> None:
        async with open_tenant_command(tenant, data_dir) as command, command.query() as session:
            with nullcontext(sys.stdout) if output is None else output.open("x", newline="") as file:
                await write_rows(file, form, exported_rows(session, command.tenant_id, f"m:{month}"))

    run_command(work())


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
            writer.writerow({**document, **{name: plain(document[name]) for name in TEXTS}})


def written(value: Any) -> Any:
    """Times in RFC 3339 (UTC), ids as text, numbers as they are."""
    if isinstance(value, datetime):
        return utc_text(value)
    return str(value) if isinstance(value, UUID) else value


def plain(text: str | None) -> str | None:
    """The text with an apostrophe before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if text is not None and text.startswith(_FORMULA) else text


@dataclass(slots=True)
class Summary:
    """What was compared of one kind of sums, and what differs."""

    compared: str
    start: str
    end: str
    sums: int = 0
    differing: int = 0
    drift_pico: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        self.sums += comparison.sums
        self.differing += comparison.differing
        self.drift_pico += comparison.drift_pico
        self.named += map(str, comparison.named)

    def row(self) -> dict[str, Any]:
        values = (self.compared, self.start, self.end, self.sums, self.differing, self.drift_pico)
        return dict(zip(COMPARED, values, strict=True))


@app.command()
def reconcile(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Compare the ledger with the rollups, the totals, final invoices and the quota counters. Exit code 1 if anything differs.

    Nothing is changed. A difference of the counters counts if it stays the same for five seconds.
    """

    found: list[Summary] = []

    async def work() -> None:
        async with open_command_stores(data_dir) as stores:
            found.extend(await compared_sums(stores.database))
            if stores.redis_url is None:
                typer.echo("counters: not compared, since no Valkey is configured or runs here", err=True)
            else:
                found.append(await compared_counters(stores.database, stores.redis_url))

    run_command(work())
    report(found, as_json)
    if any(each.differing for each in found):
        raise typer.Exit(1)


def report(found: Sequence[Summary], as_json: bool) -> None:
    """Print what was compared, then each difference: on standard error for people."""
    if as_json:
        typer.echo(json.dumps([{**each.row(), "differences": each.named} for each in found]))
        return
    print_rows([each.row() for each in found], False, COMPARED)
    for each in found:
        for named in each.named:
            typer.echo(f"{each.compared}: {named}", err=True)


async def compared_sums(database: Database) -> list[Summary]:
    """Compare the whole ledger with its rollups and totals."""
    async with database.as_operator() as session:
        first, summed = await first_comparable(session), await first_summed(session)
    now = datetime.now(UTC)
    start = (first or now).isoformat(timespec="seconds")
    summaries = {name: Summary(name, start, now.isoformat(timespec="seconds")) for name in SUMS}
    of_rows = () if first is None else all_ranges(first, now, DAY)
    for part in chain(of_rows, () if summed is None else monthly_ranges(summed, now)):
        async with database.as_operator() as session:
            summaries[part.store].add(await compare(session, part))
    return [*summaries.values()]


async def compared_counters(database: Database, redis_url: str) -> Summary:
    """Compare the quota counters of all tenants with the totals of their current day and month. Raises `StoreUnavailable`."""
    now = datetime.now(UTC)
    periods = periods_of(now)
    summary = Summary("counters", period_start(periods.month).isoformat(), now.isoformat(timespec="seconds"))
    async with database.as_operator() as session:
        tenants = await counted_tenants(session)
    client, ledger = open_valkey(redis_url), UsageLedger(database)
    try:
        drifts = await counter_drifts(ledger, Counters(client), tenants, APART_S)
    finally:
        await ledger.close()
        await client.aclose()
    summary.sums, summary.differing = len(tenants), len(drifts)
    summary.drift_pico = sum(drift.pico for drift in drifts.values())
    for tenant_id, drift in drifts.items():
        behind = ", ".join(
            f"{use.period} tokens {-use.tokens:+d} amount_nano {-use.amount_nano:+d}" for use in drift.behind
        )
        summary.named.append(f"tenant {tenant_id}: {behind}")
    return summary
