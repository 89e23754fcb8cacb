"""The first start of an installation: there is no operator yet, and no default password.

Invariant: the server prints a link that makes its bearer an operator only while there is none. The newest link alone works.
"""

from loraplex.platform.services.actors import system_actor
from loraplex.platform.services.people.accounts import has_operator, invite_operator
from loraplex.platform.services.people.link_addresses import link_address
from loraplex.platform.services.unit_of_work import unit_of_work
from loraplex.tenants.database import Database


async def first_run_notice(database: Database, root: str) -> str | None:
    """Return the text with the link of the first operator; None where there is one. `root`: the address of the console.

    Raises `DatabaseUnavailable`.
    """
    if await has_operator(database):
        return None
    async with unit_of_work(database, system_actor("serve"), None, None) as uow:
        token = await invite_operator(uow)
    return (
        "Become the first operator by this link. It works once, for an hour; "
        "`loraplex user create --operator` prints another:\n"
        f"  {link_address(root, token, operator=True)}"
    )
