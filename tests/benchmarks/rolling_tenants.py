"""Migrates a database and creates the tenants of a rolling upgrade, with the code of the release that this process imports.

Invariant: it imports only what the release before has, too.
"""

import asyncio
import sys
from typing import Final
from uuid import UUID

import msgspec

from loraplex.platform.datastores.migrations import newest_revision, upgrade
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.scopes import INFERENCE

MODULE: Final = "tests.benchmarks.rolling_tenants"


class RollingTenant(msgspec.Struct, frozen=True):
    """A tenant and its key. `revision`: of the database's schema when it was created."""

    id: UUID
    key: str
    revision: str


async def create(database_url: str, name: str, tokens_per_day: int) -> RollingTenant:
    """Create a tenant with that limit."""
    database = Database(database_url)
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create(name)
        issued = await KeyRepository(session).create(tenant.id, name, [INFERENCE])
        session.add(Quota(tenant_id=tenant.id, tokens_per_day=tokens_per_day))
    await database.close()
    return RollingTenant(tenant.id, issued.plaintext, newest_revision())


def main() -> None:
    """Arguments: the database's address, then name and limit of each tenant. Writes the tenants as JSON."""
    database_url, *tenants = sys.argv[1:]
    upgrade(database_url)
    pairs = zip(tenants[::2], map(int, tenants[1::2]), strict=True)
    created = [asyncio.run(create(database_url, name, limit)) for name, limit in pairs]
    sys.stdout.buffer.write(msgspec.json.encode(created))


if __name__ == "__main__":
    main()
