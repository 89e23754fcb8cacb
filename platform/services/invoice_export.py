"""Writes an invoice with all that recomputes it into a folder. Invariant: it changes nothing; the folder is new, or an error."""

from pathlib import Path
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvalidField
from loraplex.tenants.invoices.export import write_export
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.rows import InvoiceRows


async def export(session: AsyncSession, invoice_id: UUID, folder: Path) -> None:
    """Export a final invoice.

    Raises `InvoiceNotFound`, `InvoiceStateForbids` for a draft, `UsageIncomplete` where rows of its months are deleted, and
    `InvalidField` for a folder that cannot be made.
    """
    repository = InvoiceRepository(session)
    invoice = await repository.details(await repository.by_id(invoice_id))
    rows = InvoiceRows(invoice=invoice, session=session)
    await rows.load()
    try:
        await write_export(folder, invoice, rows.prices, rows.billed, rows.rows())
    except OSError as error:
        raise InvalidField("folder", f"{folder} cannot be written: {error.strerror}") from error
