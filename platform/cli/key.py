"""`loraplex key`: create, list, rotate and revoke API keys of a tenant, or of operators.

Invariant: every command names the owner of its keys, with `--tenant NAME` or `--operator`, never both.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.cli.command_context import open_database, run_command
from loraplex.platform.cli.output import print_document, print_key, print_rows
from loraplex.platform.cli.policy_change import PolicyChange, policy_change
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.scopes import INFERENCE, OPERATOR
from loraplex.tenants.models import ApiKey

app = typer.Typer(name="key", help="API keys of tenants and operators.", no_args_is_help=True)

TenantName = Annotated[str | None, typer.Option("--tenant", help="The tenant's name.")]
Operator = Annotated[bool, typer.Option("--operator", help="Operator keys, which belong to no tenant.")]
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
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="The server's data directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
COLUMNS = (
    "key_id",
    "name",
    "environment",
    "scopes",
    "created_at",
    "expires_at",
    "revoked_at",
    "last_used_at",
)
TIMES = ("created_at", "expires_at", "revoked_at", "last_used_at")
CREATED_BY = "command"


@app.command()
def create(
    tenant: TenantName = None,
    operator: Operator = False,
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

    async def work() -> None:
        async with policy_change("key create", data_dir) as change:
            owner = await owner_id(change.session, tenant)
            issued = await KeyRepository(change.session).create(
                *(owner, name, scopes, environment, expires_at),
                allowed_cidrs=allowed_cidr or (),
                created_by=CREATED_BY,
            )
            await note(change, "create", issued.record)
        print_key(issued.plaintext, as_json)

    run_command(work())


@app.command("list")
def list_keys(
    tenant: TenantName = None, operator: Operator = False, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """List keys. Secrets are not stored, so they are never printed."""
    check_owner(tenant, operator)

    async def work() -> None:
        async with open_database(data_dir) as database, database.as_operator() as session:
            keys = await KeyRepository(session).list(await owner_id(session, tenant))
        print_rows([key_document(key) for key in keys], as_json, COLUMNS)

    run_command(work())


@app.command()
def rotate(
    key_id: KeyId,
    tenant: TenantName = None,
    operator: Operator = False,
    grace_seconds: GraceSeconds = 0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one with the same rights and print it once."""
    check_owner(tenant, operator)

    async def work() -> None:
        async with policy_change("key rotate", data_dir) as change:
            keys, owner = KeyRepository(change.session), await owner_id(change.session, tenant)
            old = await keys.locked(owner, key_id)
            before = key_document(old)
            issued = await keys.rotate(owner, key_id, grace_seconds, created_by=CREATED_BY)
            await note(change, "rotate", old, before)
            await note(change, "create", issued.record)
        print_key(issued.plaintext, as_json)

    run_command(work())


@app.command()
def revoke(
    key_id: KeyId,
    tenant: TenantName = None,
    operator: Operator = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key at once."""
    check_owner(tenant, operator)

    async def work() -> None:
        async with policy_change("key revoke", data_dir) as change:
            keys, owner = KeyRepository(change.session), await owner_id(change.session, tenant)
            before = key_document(await keys.locked(owner, key_id))
            key = await keys.revoke(owner, key_id)
            await note(change, "revoke", key, before)
        print_document(key_document(key), as_json)

    run_command(work())


def check_owner(tenant: str | None, operator: bool) -> None:
    if (tenant is None) != operator:
        raise typer.BadParameter("name the owner of the keys: either --tenant NAME or --operator")


async def owner_id(session: AsyncSession, tenant: str | None) -> UUID | None:
    return None if tenant is None else (await TenantRepository(session).get(tenant)).id


async def note(change: PolicyChange, verb: str, key: ApiKey, before: dict[str, Any] | None = None) -> None:
    """Write the change to the audit log of the key's tenant, or of the operators."""
    await change.audit(key.tenant_id).record(f"key.{verb}", f"keys/{key.key_id}", before, key_document(key))


def key_document(key: ApiKey) -> dict[str, Any]:
    times = {name: getattr(key, name) for name in TIMES}
    return {
        "key_id": key.key_id,
        "name": key.name,
        "environment": key.environment,
        "scopes": key.scopes,
        "allowed_cidrs": key.allowed_cidrs,
        "created_by": key.created_by,
        **{
            name: None if time is None else time.isoformat(timespec="seconds") for name, time in times.items()
        },
    }
