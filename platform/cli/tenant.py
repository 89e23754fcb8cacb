"""`loraplex tenant`: commands on tenants, which work on the database itself, without HTTP.

Invariant: a key is printed once, alone on standard output. Running servers apply a change within the time that they cache
keys.
"""

from typing import Annotated, Any
from uuid import UUID

import typer

from loraplex.platform.cli.command_context import (
    DataDir,
    async_command,
    command_unit_of_work,
    open_database,
)
from loraplex.platform.cli.output import AsJson, print_document, print_key, print_rows, times_of
from loraplex.tenants.accounts.records import TenantAccountDocument, TierChange
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.models import Tenant
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.limits import MAXIMA
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.unit_of_work import UnitOfWork

app = typer.Typer(name="tenant", help="Tenants: operator work without HTTP.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
Weight = Annotated[float, typer.Option(help="Fair share of the engine, relative to others (at most 1000).")]
Tier = Annotated[str, typer.Option(help="The name of the tenant's tier.")]
Unknown = Annotated[str, typer.Option(help="Of requests: default, refuse or report.")]
LimitOptions = Annotated[
    list[str] | None,
    typer.Option("--limit", help=f"NAME=NUMBER, may be repeated. Names: {', '.join(MAXIMA)}."),
]
EndRunning = Annotated[bool, typer.Option(help="End its running requests within 2 s, on every gateway.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
COLUMNS = ("name", "tier", "weight", "suspended_at", "created_at")
TIMES = ("suspended_at", "deleted_at", "erased_at", "created_at")


@app.command()
@async_command
async def create(
    name: Name,
    weight: Weight = 1.0,
    tier: Tier = "standard",
    unknown_parameters: Unknown = "default",
    limit: LimitOptions = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant and print its first key (scope tenant:admin) once."""
    limits = dict(read_limit(text) for text in limit or ())
    async with command_unit_of_work(data_dir) as uow:
        created = await tenants.create(uow, name, tier=tier, weight=weight, limits=limits)
        await tenants.change_tier(uow, created.id, TierChange(unknown_parameters=unknown_parameters))
    print_key(created.api_key, as_json)


@app.command("list")
@async_command
async def list_tenants(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all tenants."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        documents = [tenant_document(tenant) for tenant in await TenantRepository(session).list()]
    print_rows(documents, as_json, COLUMNS)


@app.command()
@async_command
async def show(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one tenant with its limits, its adapters and the public ids of its keys."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        tenant = await TenantRepository(session).get(name)
        keys = await KeyRepository(session).list(tenant.id)
        adapters = await AdapterRepository(session, tenant.id).list()
        limits = (await QuotaRepository(session, tenant.id).tenant()).limits
    document = tenant_document(tenant) | {
        "limits": {name: value for name, value in limits.items() if value is not None},
        "adapters": [adapter.name for adapter in adapters],
        "key_ids": [key.key_id for key in keys if key.revoked_at is None],
    }
    print_document(document, as_json)


@app.command()
@async_command
async def suspend(
    name: Name, end_running: EndRunning = True, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Suspend a tenant: none of its keys authenticates until it is resumed."""
    async with command_unit_of_work(data_dir) as uow:
        tenant_id = await tenant_id_of(uow, name)
        tenant = await tenants.suspend(uow, tenant_id, end_running=end_running)
    print_document(tenant_document(tenant), as_json)


@app.command()
@async_command
async def resume(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Resume a suspended tenant."""
    async with command_unit_of_work(data_dir) as uow:
        tenant = await tenants.resume(uow, await tenant_id_of(uow, name))
    print_document(tenant_document(tenant), as_json)


@app.command()
@async_command
async def delete(name: Name, yes: Yes = False, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete a tenant for good. The numbers of its usage stay.

    Its keys stop working at once. A running server, or the next one that starts, erases its adapters and other data.
    """
    if not yes and typer.prompt(f"Type the name of the tenant to delete ({name})", err=True) != name:
        raise typer.BadParameter("the names differ: nothing was deleted")
    async with command_unit_of_work(data_dir) as uow:
        tenant = await tenants.delete(uow, await tenant_id_of(uow, name))
    print_document(tenant_document(tenant), as_json)


def read_limit(text: str) -> tuple[str, int]:
    """Parse `NAME=NUMBER`. The limits themselves check the size of the number."""
    name, _, number = text.partition("=")
    if name not in MAXIMA or not number.isdecimal() or len(number) > 18:
        raise typer.BadParameter(f"--limit {text[:80]}: write NAME=NUMBER with a name of {', '.join(MAXIMA)}")
    return name, int(number)


async def tenant_id_of(uow: UnitOfWork, name: str) -> UUID:
    return (await TenantRepository(uow.session).get(name)).id


def tenant_document(tenant: Tenant | TenantAccountDocument) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "id": str(tenant.id),
        "tier": tenant.tier,
        "weight": tenant.weight,
        "unknown_parameters": tenant.unknown_parameters,
        **times_of(tenant, TIMES),
    }
