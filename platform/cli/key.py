"""`loraplex key`: create, list, rotate and revoke API keys of a tenant, or of operators.

Invariant: every command names the owner of its keys, with `--tenant NAME` or `--operator`, never both.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.cli.command_context import DataDir, async_command, command_unit_of_work, open_database
from loraplex.platform.cli.output import AsJson, print_document, print_key, print_rows, times_of
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys import queries
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.records import KeyChange, KeyDocument
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.scopes import INFERENCE, OPERATOR

app = typer.Typer(name="key", help="API keys of tenants and operators.", no_args_is_help=True)

TenantName = Annotated[str | None, typer.Option("--tenant", help="The tenant's name.")]
OfOperators = Annotated[bool, typer.Option("--operator", help="Operator keys, which belong to no tenant.")]
KeyId = Annotated[str, typer.Argument(help="The public id: the third part of the key.")]
Scopes = Annotated[list[str] | None, typer.Option("--scope", help="May be repeated. Default: inference.")]
KeyName = Annotated[str, typer.Option("--name", help="What the key is for.")]
Environment = Annotated[str, typer.Option(help="live or test.")]
ExpiresInDays = Annotated[int | None, typer.Option(min=1, max=3650, help="Days until it expires.")]
AllowedCidrs = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-cidr", help="A network from which it may be used; may be repeated. Default: all networks."
    ),
]
GraceSeconds = Annotated[
    int, typer.Option(help="Seconds for which the old key still works, at most 30 days.")
]
EndRunning = Annotated[
    bool, typer.Option("--end-running", help="End its running requests within 2 s, on every gateway.")
]
COLUMNS = ("key_id", "name", "scopes", "created_at", "last_used_at", "expires_at", "revoked_at")
TIMES = ("created_at", "expires_at", "revoked_at", "last_used_at")


@app.command()
@async_command
async def create(
    tenant: TenantName = None,
    operator: OfOperators = False,
    scope: Scopes = None,
    name: KeyName = "cli",
    environment: Environment = "live",
    expires_in_days: ExpiresInDays = None,
    allowed_cidr: AllowedCidrs = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once."""
    check_owner(tenant, operator)
    scopes = scope or [OPERATOR if operator else INFERENCE]
    expires_at = None if expires_in_days is None else datetime.now(UTC) + timedelta(days=expires_in_days)
    bounds = KeyChange(expires_at=expires_at, allowed_cidrs=allowed_cidr or ())
    async with command_unit_of_work(data_dir) as uow:
        right = Operator(await owner_id(uow.session, tenant), environment)
        key = await api_keys.create(uow, right, name, scopes, bounds)
    print_key(key.api_key, as_json)


@app.command("list")
@async_command
async def list_keys(
    tenant: TenantName = None,
    operator: OfOperators = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List keys. Secrets are not stored, so they are never printed."""
    check_owner(tenant, operator)
    async with open_database(data_dir) as database, database.as_operator() as session:
        keys = await queries.keys(session, await owner_id(session, tenant))
    print_rows([key_document(key) for key in keys], as_json, COLUMNS)


@app.command()
@async_command
async def rotate(
    key_id: KeyId,
    tenant: TenantName = None,
    operator: OfOperators = False,
    grace_seconds: GraceSeconds = 0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one with the same rights and print it once."""
    check_owner(tenant, operator)
    async with command_unit_of_work(data_dir) as uow:
        right = Operator(await owner_id(uow.session, tenant))
        key = await api_keys.rotate(uow, right, key_id, grace_seconds)
    print_key(key.api_key, as_json)


@app.command()
@async_command
async def revoke(
    key_id: KeyId,
    tenant: TenantName = None,
    operator: OfOperators = False,
    end_running: EndRunning = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key at once."""
    check_owner(tenant, operator)
    async with command_unit_of_work(data_dir) as uow:
        right = Operator(await owner_id(uow.session, tenant))
        key = await api_keys.revoke(uow, right, key_id, end_running=end_running)
    print_document(key_document(key), as_json)


def check_owner(tenant: str | None, operator: bool) -> None:
    if (tenant is None) != operator:
        raise typer.BadParameter("name the owner of the keys: either --tenant NAME or --operator")


async def owner_id(session: AsyncSession, tenant: str | None) -> UUID | None:
    return None if tenant is None else (await TenantRepository(session).get(tenant)).id


def key_document(key: KeyDocument) -> dict[str, Any]:
    return {
        "key_id": key.id,
        **key.model_dump(include={"name", "environment", "scopes", "allowed_cidrs", "created_by"}),
        **times_of(key, TIMES, "seconds"),
    }
