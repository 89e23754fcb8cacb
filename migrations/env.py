"""Runs migrations in one transaction. Invariant: one run at a time (an advisory lock), and no run waits for a lock or a
statement without bound. The caller passes the address as `config.attributes["url"]`.
"""

from typing import Any

from alembic import context
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from loraplex.tenants.models import Base

ADVISORY_LOCK = 7_219_604_418_233
LOCK_TIMEOUT = "15s"
STATEMENT_TIMEOUT = "10min"
WAIT_FOR_OTHER_RUN = "2min"


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, compare_server_default=True)
    with context.begin_transaction():
        set_timeouts(connection, lock=WAIT_FOR_OTHER_RUN, statement=WAIT_FOR_OTHER_RUN)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
        set_timeouts(connection, lock=LOCK_TIMEOUT, statement=STATEMENT_TIMEOUT)
        context.run_migrations()


def set_timeouts(connection: Connection, lock: str, statement: str) -> None:
    connection.execute(
        text(
            "SELECT set_config('lock_timeout', :lock, true), set_config('statement_timeout', :statement, true)"
        ),
        {"lock": lock, "statement": statement},
    )


def main(attributes: dict[str, Any]) -> None:
    if "url" not in attributes:
        raise ValueError("migrations need the database address: run `loraplex migrate`")
    engine = create_engine(attributes["url"], poolclass=NullPool)
    with engine.connect() as connection:
        migrate(connection)


main(context.config.attributes)
