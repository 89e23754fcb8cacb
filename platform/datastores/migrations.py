"""Reads and migrates the revision of the database schema.

Invariant: alembic runs in this process with the scripts of the installed package, so a wheel migrates like a checkout.
"""

from importlib.resources import files
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from loraplex.tenants.database import parse_database_url


def alembic_config(url: str) -> Config:
    """Build an alembic configuration for `url` without a file."""
    attributes: dict[str, Any] = {"url": parse_database_url(url)}
    config = Config(attributes=attributes)
    config.set_main_option("script_location", str(files("loraplex.migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Migrate `url` up to `revision`. A second run at the same time waits for the first."""
    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Migrate `url` down to `revision` ("base" removes everything)."""
    command.downgrade(alembic_config(url), revision)


def newest_revision(url: str) -> str | None:
    return ScriptDirectory.from_config(alembic_config(url)).get_current_head()


def require_known(url: str, revision: str) -> None:
    """Raises `CommandError` of alembic for a revision that this version does not have, such as that of a newer version."""
    ScriptDirectory.from_config(alembic_config(url)).get_revision(revision)


def current_revision(url: str) -> str | None:
    """The revision of the database; None if it was never migrated."""
    engine = create_engine(parse_database_url(url), poolclass=NullPool)
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()
