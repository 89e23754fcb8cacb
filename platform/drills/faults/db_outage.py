"""`db-outage`: PostgreSQL refuses every connection to the installation's database, embedded or external.

Invariant: nothing in the database changes, and other databases of the server are not touched.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import psycopg

from loraplex.platform.datastores.embedded.server_role import MAINTENANCE_DATABASE
from loraplex.platform.drills.errors import DrillImpossible
from loraplex.platform.drills.faults.fault import Fault, Observed
from loraplex.platform.drills.report import Promise
from loraplex.platform.drills.traffic import RequestOutcome
from loraplex.platform.drills.undo import AllowConnections, allow_connections, maintenance_connection
from loraplex.tenants.database import parse_database_url

IS_OWNER: Final = "SELECT pg_has_role(current_user, datdba, 'MEMBER') FROM pg_database WHERE datname = %s"
TERMINATE: Final = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = %s AND usename = current_user AND backend_type = 'client backend'
"""


@dataclass(slots=True, kw_only=True)
class DatabaseOutage(Fault):
    """Connections are refused and those of the server's role are ended."""

    name: ClassVar[str] = "db-outage"
    allowed_errors: ClassVar[frozenset[str]] = frozenset()

    _began_s: float = field(default=0.0, init=False)

    @property
    def _database(self) -> str:
        return parse_database_url(self.installation.database_url).database or ""

    async def check(self) -> None:
        if self._database in ("", MAINTENANCE_DATABASE):
            raise DrillImpossible(
                f"the database must not be `{MAINTENANCE_DATABASE}`, from which the drill ends the outage"
            )
        try:
            async with await maintenance_connection(self.installation.database_url) as connection:
                found = await (await connection.execute(IS_OWNER, [self._database])).fetchone()
        except psycopg.Error as error:
            raise DrillImpossible(
                f"the drill needs a connection to the database `{MAINTENANCE_DATABASE}`: {error}"
            ) from error
        if found is None or not found[0]:
            raise DrillImpossible(
                f"the role of DATABASE_URL must own the database {self._database} to refuse connections to it"
            )
        if (known_s := self.installation.settings.known_caller_s) <= self.seconds:
            raise DrillImpossible(
                f"known callers are served for known_caller_s = {known_s:g} s without PostgreSQL: give a shorter --seconds"
            )

    def plan(self) -> str:
        return (
            f"make PostgreSQL refuse connections to the database {self._database} for {self.seconds:g} s and end those that "
            "are open. Callers that the gateways know are served on; new callers, the console and the management API get "
            f"503. If neither this command nor its watchdog can end it: connect to {MAINTENANCE_DATABASE} and run ALTER "
            f'DATABASE "{self._database}" ALLOW_CONNECTIONS true.'
        )

    def undo(self) -> AllowConnections:
        return AllowConnections(self.installation.database_url)

    async def begin(self) -> None:
        self._began_s = time.monotonic()
        await allow_connections(self.installation.database_url, allowed=False)
        async with await maintenance_connection(self.installation.database_url) as connection:
            await connection.execute(TERMINATE, [self._database])

    def has_shown(self, outcomes: Sequence[RequestOutcome]) -> bool:
        return any(each.complete and each.started_s >= self._began_s for each in outcomes)

    async def promises(self, observed: Observed) -> list[Promise]:
        served = observed.served_meanwhile
        return [Promise("known callers are served without PostgreSQL", served > 0, f"{served} meanwhile")]
