"""The statements that a `Database` sends to PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from loraplex.tenants.database import Database


@contextmanager
def sent_statements(database: Database) -> Iterator[list[str]]:
    """Collect the statements that the block sends, those that take a role included."""
    sent, engine = list[str](), database._engine.sync_engine

    def add(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", add)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", add)
