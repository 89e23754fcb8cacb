"""`loraplex tenant`: create, list, show, suspend and resume tenants on the database itself.

Invariant: a key's text goes to standard output once and alone; everything else for humans goes around it.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.platform.commands.context import open_database, run_command
from loraplex.platform.commands.policy_change import policy_change
from loraplex.platform.commands.printing import print_document, print_key, print_rows
from loraplex.tenants.accounts import TenantRepository
from loraplex.tenants.adapters import AdapterRepository
from loraplex.tenants.keys import KeyRepository
from loraplex.tenants.models import Tenant
from loraplex.tenants.scopes import TENANT_ADMIN

app = typer.Typer(name="tenant", help="Tenants: operator work without HTTP.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The tenant's name.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Weight = Annotated[float, typer.Option(help="Fair share of the engine, relative to others (at most 1000).")]
FIRST_KEY_NAME = "admin"
COLUMNS = ("name", "id", "weight", "suspended_at", "created_at")


@app.command()
def create(name: Name, weight: Weight = 1.0, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Create a tenant and print its first key (scope tenant:admin) once."""

    async def work() -> None:
        async with open_database(data_dir) as database, database.as_operator() as session:
            tenant = await TenantRepository(session).create(name, weight)
            issued = await KeyRepository(session).create(tenant.id, FIRST_KEY_NAME, [TENANT_ADMIN])
        print_key(issued.plaintext, as_json)

    run_command(work())


@app.command("list")
def list_tenants(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all tenants."""

    async def work() -> None:
        async with open_database(data_dir) as database, database.as_operator() as session:
            documents = [tenant_document(tenant) for tenant in await TenantRepository(session).list()]
        print_rows(documents, as_json, COLUMNS)

    run_command(work())


@app.command()
def show(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one tenant with its adapters and the public ids of its keys."""

    async def work() -> None:
        async with open_database(data_dir) as database, database.as_operator() as session:
            tenant = await TenantRepository(session).get(name)
            keys = await KeyRepository(session).list(tenant.id)
            adapters = await AdapterRepository(session, tenant.id).list()
        document = tenant_document(tenant) | {
            "adapters": [adapter.name for adapter in adapters],
            "key_ids": [key.key_id for key in keys if key.revoked_at is None],
        }
        print_document(document, as_json)

    run_command(work())


@app.command()
def suspend(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Suspend a tenant: none of its keys authenticates until it is resumed."""

    async def work() -> None:
        async with policy_change("tenant suspend", data_dir) as change:
            tenant = await TenantRepository(change.session).suspend(name)
            change.tenants.add(tenant.id)
        print_document(tenant_document(tenant), as_json)

    run_command(work())


@app.command()
def resume(name: Name, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Resume a suspended tenant."""

    async def work() -> None:
        async with policy_change("tenant resume", data_dir) as change:
            tenant = await TenantRepository(change.session).resume(name)
            change.tenants.add(tenant.id)
        print_document(tenant_document(tenant), as_json)

    run_command(work())


def tenant_document(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "id": str(tenant.id),
        "weight": tenant.weight,
        "suspended_at": None if tenant.suspended_at is None else tenant.suspended_at.isoformat(),
        "created_at": tenant.created_at.isoformat(),
    }
