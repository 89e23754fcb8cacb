"""`loraplex invoice`: preview, finalize, list, pay and void invoices, export them, and verify an export without a database."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from loraplex.platform.cli.command_context import (
    DataDir,
    async_command,
    command_unit_of_work,
    exit_codes,
    open_database,
)
from loraplex.platform.cli.output import AsJson, print_document, print_rows
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.records import InvoiceDocument
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export
from loraplex.tenants.pages import Part

app = typer.Typer(name="invoice", help="Invoices of tenants. Months are UTC.", no_args_is_help=True)

TenantName = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]
OneTenant = Annotated[str | None, typer.Option("--tenant", help="Only those of this tenant.")]
MonthName = Annotated[str, typer.Option("--month", help="YYYY-MM.")]
Currency = Annotated[str | None, typer.Option(help="Default: the tenant's currency in the month.")]
InvoiceId = Annotated[UUID, typer.Argument(help="The invoice's id, as `list` prints it.")]
Reference = Annotated[str, typer.Option(help="What the payment is found by, such as the id of a transfer.")]
Folder = Annotated[Path, typer.Argument(help="The folder of the export.")]
COLUMNS = ("id", "tenant", "month", "state", "total")
LINE_COLUMNS = ("kind", "month", "adapter", "token_class", "price", "tokens", "amount_micro")
MAX_ROWS = 10_000


@app.command()
@async_command
async def preview(
    tenant: TenantName,
    month: MonthName,
    currency: Currency = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Print what finalizing a month would lead to. Nothing is written."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        tenant_id = (await TenantRepository(session).get(tenant)).id
        found = await queries.preview(session, tenant_id, Month.parse(month), currency)
    print_invoice(found, as_json)


@app.command()
@async_command
async def finalize(
    tenant: TenantName,
    month: MonthName,
    currency: Currency = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make the invoice of a month final that is over, also within its grace."""
    async with command_unit_of_work(data_dir) as uow:
        tenant_id = (await TenantRepository(uow.session).get(tenant)).id
        invoice = await use_cases.finalize(uow, tenant_id, Month.parse(month), currency=currency)
    print_invoice(invoice, as_json)


@app.command()
@async_command
async def paid(
    invoice_id: InvoiceId, reference: Reference, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Record the payment of a final invoice."""
    async with command_unit_of_work(data_dir) as uow:
        invoice = await use_cases.pay(uow, invoice_id, reference)
    print_invoice(invoice, as_json)


@app.command()
@async_command
async def void(invoice_id: InvoiceId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Cancel a final invoice. Its credits are given back; what it billed is billed again by the next one."""
    async with command_unit_of_work(data_dir) as uow:
        invoice = await use_cases.void(uow, invoice_id)
    print_invoice(invoice, as_json)


@app.command("list")
@async_command
async def list_invoices(tenant: OneTenant = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List invoices, newest first, at most 10000."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        found = await queries.invoices_of_all(session, tenant, {}, Part(MAX_ROWS))
    print_rows([each.model_dump(mode="json") for each in found], as_json, COLUMNS)


@app.command()
@async_command
async def export(invoice_id: InvoiceId, folder: Folder, data_dir: DataDir = None) -> None:
    """Write a final invoice with its requests, prices and credits into a new folder, which `verify` reads."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        await export_invoice(session, invoice_id, folder)


@app.command()
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Recompute an exported invoice, offline. Exit code 1: it differs; the first line names the first digit that does."""
    with exit_codes():
        try:
            differences = verify_export(folder)
        except OSError as error:
            raise InvalidField("folder", f"{folder} is no export: {error}") from error
    if as_json:
        rows = [asdict(each) | {"position": each.position} for each in differences]
        print_rows(rows, as_json, ())
    else:
        typer.echo("\n".join(map(str, differences)) or "The recomputed invoice agrees in every digit.")
    if differences:
        raise typer.Exit(1)


def print_invoice(invoice: InvoiceDocument, as_json: bool) -> None:
    """Print an invoice; as tables, one of its lines and one of the rest."""
    document = invoice.model_dump(mode="json")
    if not as_json:
        print_rows(document.pop("lines"), as_json, LINE_COLUMNS)
    print_document(document, as_json)
