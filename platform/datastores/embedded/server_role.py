"""The database of the installation and the ordinary role that serves from it.

Invariant: the role owns its database and nothing else, and may take the roles of row-level security. The superuser connects
through the local socket only: to prepare the role at every start, and to dump the database before a migration.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from psycopg import Connection, sql

from loraplex.tenants.database import ROLES

SUPERUSER: Final = "loraplex"
SERVER_ROLE: Final = "loraplex_server"
DATABASE: Final = "loraplex"
MAINTENANCE_DATABASE: Final = "postgres"

Connect: TypeAlias = Callable[[str], Connection]
"""Connects to a database of this name as the superuser, in autocommit mode."""

ORDINARY: Final = sql.SQL("NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION NOBYPASSRLS")
# Until this role existed, the superuser served: it owns the tables and functions of such a database, and row-level security
# names it. A sequence of a column follows its table.
TRANSFER: Final = """
DO $$ DECLARE statement text; BEGIN
    FOR statement IN
        SELECT format('ALTER TABLE %s OWNER TO {role}', oid::regclass) FROM pg_class
        WHERE relnamespace = 'public'::regnamespace AND relowner = '{superuser}'::regrole AND relkind IN ('r', 'p', 'v', 'm', 'S')
        AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = pg_class.oid AND relkind = 'S' AND d.deptype IN ('a', 'i'))
        UNION ALL SELECT format('ALTER ROUTINE %s OWNER TO {role}', oid::regprocedure) FROM pg_proc
        WHERE pronamespace = 'public'::regnamespace AND proowner = '{superuser}'::regrole
        UNION ALL SELECT format('ALTER POLICY %I ON %s TO {role}', polname, polrelid::regclass) FROM pg_policy
        WHERE polroles = ARRAY['{superuser}'::regrole::oid]
    LOOP EXECUTE statement; END LOOP;
END $$
"""


def prepare_database(connect: Connect, password: str) -> None:
    """Create the role and its database where they are missing; give it what the superuser owned there. Repeatable."""
    with connect(MAINTENANCE_DATABASE) as connection:
        _prepare_roles(connection, password)
        found = connection.execute("SELECT FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
        statement = "CREATE DATABASE {} OWNER {}" if found is None else "ALTER DATABASE {} OWNER TO {}"
        connection.execute(sql.SQL(statement).format(sql.Identifier(DATABASE), sql.Identifier(SERVER_ROLE)))
    with connect(DATABASE) as connection:
        connection.execute(TRANSFER.format(role=SERVER_ROLE, superuser=SUPERUSER))


def _prepare_roles(connection: Connection, password: str) -> None:
    _create_missing(connection, (SERVER_ROLE,))
    # Only the verifier is sent, so no log contains the password.
    verifier = connection.pgconn.encrypt_password(password.encode(), SERVER_ROLE.encode(), b"scram-sha-256")
    connection.execute(
        sql.SQL("ALTER ROLE {} LOGIN NOINHERIT {} PASSWORD {}").format(
            sql.Identifier(SERVER_ROLE), ORDINARY, sql.Literal(verifier.decode())
        )
    )
    prepare_row_roles(connection, SERVER_ROLE)


def prepare_row_roles(connection: Connection, server_role: str) -> None:
    """Create the roles of row-level security where they are missing, and let the server's role take them. Repeatable."""
    _create_missing(connection, ROLES)
    granted = sql.SQL(", ").join(map(sql.Identifier, ROLES))
    connection.execute(sql.SQL("GRANT {} TO {}").format(granted, sql.Identifier(server_role)))


def _create_missing(connection: Connection, roles: Sequence[str]) -> None:
    for role in roles:
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is None:
            connection.execute(sql.SQL("CREATE ROLE {} NOLOGIN {}").format(sql.Identifier(role), ORDINARY))
