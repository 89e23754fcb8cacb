"""The first start of an installation: there is no operator yet, and no default password.

Invariant: the server prints a link that makes its bearer an operator only while there is none, at most once an hour, and only where
no log collector reads it. The newest link alone works.
"""

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.people.accounts import has_operator, invite_operator, was_operator_invited
from loraplex.tenants.people.records import link_address
from loraplex.tenants.unit_of_work import unit_of_work


async def first_run_notice(database: Database, root: str, *, shows_link: bool) -> str | None:
    """Return the text with the link of the first operator; None where there is one. `root`: the address of the console.

    `shows_link` False: what is printed is collected with the logs, and a server that is restarted again and again would fill them
    with links. Raises `DatabaseUnavailable`.
    """
    if await has_operator(database):
        return None
    actor = system_actor("serve")
    if not shows_link or await was_operator_invited(database, actor.name):
        return "There is no operator yet: `loraplex user create --operator` prints a link for the first one."
    async with unit_of_work(database, actor, None, None) as uow:
        token = await invite_operator(uow)
    return (
        "Become the first operator by this link. It works once, for an hour; "
        "`loraplex user create --operator` prints another:\n"
        f"  {link_address(root, token, operator=True)}"
    )
