"""`loraplex open`: a link that signs a person in to the console once, and the console itself where there is a display."""

import os
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.cli.command_context import DataDir, async_command, command_unit_of_work
from loraplex.platform.cli.output import AsJson
from loraplex.platform.cli.user import console_root, print_link
from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.models import User
from loraplex.tenants.people import accounts, users
from loraplex.tenants.people.links import FIRST_RUN_LIFETIME
from loraplex.tenants.people.memberships import administered_tenants
from loraplex.tenants.people.records import link_address


@async_command
async def open_command(
    user: Annotated[str | None, typer.Option(help="The person's address; default the only operator.")] = None,
    tenant: Annotated[str | None, typer.Option(help="The only admin of this tenant.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Open the console, signed in. The link works once, for an hour."""
    async with command_unit_of_work(data_dir) as uow:
        root, ends = console_root(data_dir), datetime.now(UTC) + FIRST_RUN_LIFETIME
        person = await (users.get(uow.session, user) if user else _only_person(uow.session, tenant))
        token = await accounts.sign_in_link(uow, person.email)
    address = link_address(root, token, operator=person.is_operator and tenant is None)
    print_link(address, f"{person.email} is signed in", ends, as_json)
    has_display = sys.platform == "darwin" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if has_display and sys.stdout.isatty():
        typer.launch(address)


async def _only_person(session: AsyncSession, tenant: str | None) -> User:
    """The only admin of the tenant; without one the only operator, or the only person. Raises `UserNotFound`."""
    people = [each for each in await accounts.all_users(session) if each.disabled_at is None]
    if tenant is not None:
        found = [each for each in people if tenant in (await administered_tenants(session, each.id)).values()]
    else:
        found = [each for each in people if each.is_operator] or people
    if len(found) != 1:
        names = ", ".join(each.email for each in found[:10])
        raise UserNotFound(
            f"choose one with --user EMAIL: {names}"
            if found
            else "nobody has an account yet: `loraplex user create` invites a person"
        )
    return found[0]
