"""`loraplex credit`: grant credits to tenants and list them. Invariant: a credit is never changed or taken back."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from loraplex.platform.cli.command_context import (
    DataDir,
    async_command,
    command_unit_of_work,
    open_database,
)
from loraplex.platform.cli.output import AsJson, print_document, print_rows
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.invoices import queries, use_cases
from loraplex.tenants.invoices.records import DEFAULT_PRIORITY
from loraplex.tenants.pages import Part
from loraplex.tenants.rfc3339 import zoned_time

app = typer.Typer(name="credit", help="Credits of tenants, which invoices use up.", no_args_is_help=True)

TenantName = Annotated[str, typer.Option("--tenant", help="The tenant's name.")]
AmountMicro = Annotated[int, typer.Argument(help="Micro-units of money: 5000000 is 5.")]
Reason = Annotated[str, typer.Option(help="Why it is granted; the tenant reads it.")]
Priority = Annotated[int, typer.Option(help="0 to 100: of a lower one it is used first.")]
ExpiresAt = Annotated[
    str | None, typer.Option("--expires-at", help="A time with zone; it pays for months that end before.")
]
Currency = Annotated[str | None, typer.Option(help="Default: the tenant's currency.")]
MAX_ROWS = 10_000
COLUMNS = (
    *("currency", "amount_micro", "available_micro", "priority"),
    *("expires_at", "reason", "granted_at"),
)


@app.command()
@async_command
async def grant(
    amount_micro: AmountMicro,
    tenant: TenantName,
    reason: Reason,
    priority: Priority = DEFAULT_PRIORITY,
    expires_at: ExpiresAt = None,
    currency: Currency = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Grant a credit to a tenant."""
    async with command_unit_of_work(data_dir) as uow:
        tenant_id = (await TenantRepository(uow.session).get(tenant)).id
        granted = await use_cases.grant_credit(
            uow,
            tenant_id,
            amount_micro,
            reason,
            priority=priority,
            expires_at=read_time(expires_at),
            currency=currency,
        )
    print_document(granted.model_dump(mode="json"), as_json)


@app.command("list")
@async_command
async def list_credits(tenant: TenantName, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the credits of a tenant with what is left of each, newest first."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        tenant_id = (await TenantRepository(session).get(tenant)).id
        found = await queries.credits(session, tenant_id, Part(MAX_ROWS))
    print_rows([each.model_dump(mode="json") for each in found], as_json, COLUMNS)


def read_time(text: str | None) -> datetime | None:
    """Parse a time with a zone. Raises `InvalidField`."""
    if text is None:
        return None
    time = zoned_time(text)
    if time is None:
        raise InvalidField("expires_at", "expires_at must be a time with zone, such as 2026-12-31T00:00:00Z")
    return time.astimezone(UTC)
