"""`loraplex user`: people of the console, without HTTP. Invariant: a link is printed once, alone on standard output."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex.platform.cli.command_context import DataDir, async_command, command_unit_of_work, open_database
from loraplex.platform.cli.output import AsJson, print_document, print_rows, times_of
from loraplex.platform.cli.tenant import LimitOptions, Weight, read_limit
from loraplex.platform.config import load_settings
from loraplex.platform.server.gateway_address import running_gateways
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.models import User
from loraplex.tenants.people import accounts, sign_up, team
from loraplex.tenants.people.links import FIRST_RUN_LIFETIME, INVITATION_LIFETIME, RESET_LIFETIME
from loraplex.tenants.people.memberships import tenants_of
from loraplex.tenants.people.records import link_address
from loraplex.tenants.people.roles import ADMIN
from loraplex.tenants.scopes import ROLES

app = typer.Typer(name="user", help="People of the console.", no_args_is_help=True)

Email = Annotated[str, typer.Argument(help="The person's email address.")]
OptionalEmail = Annotated[
    str | None, typer.Argument(help="The address; an operator without one chooses it by the link.")
]
TenantName = Annotated[str | None, typer.Option("--tenant", help="The tenant to join.")]
Role = Annotated[str, typer.Option(help=f"The role there: {', '.join(ROLES)}.")]
Operator = Annotated[bool, typer.Option("--operator", help="An operator, who manages all tenants.")]
SecondFactor = Annotated[bool, typer.Option("--second-factor", help="Remove the second factor, too.")]
COLUMNS = ("email", "name", "operator", "tenants", "second_factor", "last_seen_at", "disabled_at")


@app.command()
@async_command
async def create(
    email: OptionalEmail = None,
    tenant: TenantName = None,
    role: Role = ADMIN,
    operator: Operator = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Invite a person, and print the link once: it works once, for 7 days (an operator's: for an hour)."""
    if (tenant is None) != operator or (tenant is not None and email is None):
        raise typer.BadParameter("give EMAIL and --tenant NAME, or --operator")
    async with command_unit_of_work(data_dir) as uow:
        root, now = console_root(data_dir), datetime.now(UTC)
        if tenant is None or email is None:
            token, ends = await accounts.invite_operator(uow, email), now + FIRST_RUN_LIFETIME
            effect = f"{email or 'its holder'} becomes an operator"
        else:
            tenant_id = (await TenantRepository(uow.session).get(tenant)).id
            token = (await team.invite(uow, tenant_id, email, role)).token
            ends = now + INVITATION_LIFETIME
            effect = f"{email} joins the tenant {tenant} as {role}"
    print_link(link_address(root, token, operator=operator), effect, ends, as_json)


@app.command("list")
@async_command
async def list_users(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List all people with their roles."""
    async with open_database(data_dir) as database, database.as_operator() as session:
        rows = []
        for user in await accounts.all_users(session):
            roles = [f"{each.name}:{each.role}" for each in await tenants_of(session, user.id)]
            rows.append(user_document(user) | {"tenants": roles})
    print_rows(rows, as_json, COLUMNS)


@app.command()
@async_command
async def reset(
    email: Email, second_factor: SecondFactor = False, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Print a link by which a person sets a new password: it works once, for 24 hours."""
    async with command_unit_of_work(data_dir) as uow:
        root, ends = console_root(data_dir), datetime.now(UTC) + RESET_LIFETIME
        token = await accounts.reset_user(uow, email, second_factor=second_factor)
    effect = f"{email} sets a new password" + (", without a second factor" if second_factor else "")
    print_link(link_address(root, token), effect, ends, as_json)


@app.command()
@async_command
async def disable(email: Email, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Let a person sign in nowhere: all sessions end at once. It names the tenants that have no admin then."""
    async with command_unit_of_work(data_dir) as uow:
        disabled = await accounts.disable_user(uow, email)
    document = user_document(disabled.user) | {"tenants_without_admin": disabled.without_admin}
    print_document(document, as_json)


@app.command()
@async_command
async def enable(email: Email, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Let a disabled person sign in again."""
    async with command_unit_of_work(data_dir) as uow:
        user = await accounts.enable_user(uow, email)
    print_document(user_document(user), as_json)


@app.command("open-sign-up")
@async_command
async def open_sign_up(
    tier: Annotated[
        str, typer.Option(help="The tier of new tenants; it chooses their rate card.")
    ] = "standard",
    weight: Weight = 1.0,
    limit: LimitOptions = None,
    data_dir: DataDir = None,
) -> None:
    """Publish what a tenant gets that signs up by itself. People sign up by mail, so `smtp_url` must be set."""
    limits = dict(read_limit(text) for text in limit or ())
    async with command_unit_of_work(data_dir) as uow:
        await sign_up.publish_plan(uow, tier, limits, weight=weight)


@app.command("close-sign-up")
@async_command
async def close_sign_up(data_dir: DataDir = None) -> None:
    """Let no further tenant sign up."""
    async with command_unit_of_work(data_dir) as uow:
        await sign_up.end_plan(uow)


def console_root(data_dir: Path | None) -> str:
    """The address of the console in links: `public_url`, else that of a server that runs on the data directory.

    Raises `DependencyFailed`.
    """
    settings = load_settings({"data_dir": data_dir})
    if settings.public_url is not None:
        return settings.public_url
    for each in running_gateways(settings.data_dir):
        if each.console_url is not None:
            return each.console_url
    raise DependencyFailed(
        f"no server with a console runs on {settings.data_dir}, so a link would lead nowhere: start it first, "
        "or set `public_url` (LORAPLEX_PUBLIC_URL) to its address"
    )


def print_link(address: str, effect: str, ends: datetime, as_json: bool) -> None:
    """Print only the link on standard output, so that `LINK=$(loraplex …)` works. `effect`: what happens by it."""
    typer.echo(json.dumps({"url": address, "expires_at": ends.isoformat()}) if as_json else address)
    typer.echo(f"By this link {effect}. It works once, until {ends:%Y-%m-%d %H:%M} UTC.", err=True)


def user_document(user: User) -> dict[str, Any]:
    return {
        "id": str(user.id),
        "email": user.email,
        "name": user.name,
        "operator": user.is_operator,
        "second_factor": user.totp_confirmed_at is not None,
        **times_of(user, ("created_at", "last_seen_at", "disabled_at")),
    }
