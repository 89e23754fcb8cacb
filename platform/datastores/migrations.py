"""Reads and migrates the revision of the database schema.

Invariant: alembic runs in this process with the scripts of the installed package, so a wheel migrates like a checkout. It is
imported only to migrate: every start asks for the two revisions, and nearly all of them have nothing to migrate.
"""

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from loraplex.tenants.database import CONNECT_SECONDS, parse_database_url

if TYPE_CHECKING:
    from alembic.config import Config

NUMBERED: Final = re.compile(r"\d+_\d+_\d+_(\d{4})_\w+\.py")


def alembic_config(url: str) -> "Config":
    """Build an alembic configuration for `url` without a file."""
    from alembic.config import Config

    attributes: dict[str, Any] = {"url": parse_database_url(url)}
    config = Config(attributes=attributes)
    config.set_main_option("script_location", str(files("loraplex.migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def upgrade(url: str, revision: str = "head") -> None:
    """Migrate `url` up to `revision`. A second run at the same time waits for the first."""
    from alembic import command

    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Migrate `url` down to `revision` ("base" removes everything)."""
    from alembic import command

    command.downgrade(alembic_config(url), revision)


def newest_revision() -> str:
    """The newest revision of this version: revisions are numbered, and the names of their files have the numbers."""
    names = (file.name for file in (files("loraplex.migrations") / "versions").iterdir())
    return max(match[1] for match in map(NUMBERED.match, names) if match is not None)


def is_newer(revision: str | None) -> bool:
    """Whether a database's revision is that of a newer version, by its number."""
    return revision is not None and revision > newest_revision()


def remedy(revision: str | None) -> str:
    """What an operator does about a database whose revision is another than the newest of this version."""
    return "start the newer version that migrated it" if is_newer(revision) else "run `loraplex migrate`"


def require_known(url: str, revision: str) -> None:
    """Raises `CommandError` of alembic for a revision that this version does not have, such as that of a newer version."""
    from alembic.script import ScriptDirectory

    ScriptDirectory.from_config(alembic_config(url)).get_revision(revision)


def current_revision(url: str) -> str | None:
    """The revision of the database; None if it was never migrated."""
    engine = create_engine(
        parse_database_url(url), poolclass=NullPool, connect_args={"connect_timeout": CONNECT_SECONDS}
    )
    with engine.connect() as connection:
        if connection.scalar(text("SELECT to_regclass('alembic_version')::text")) is None:
            return None
        revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
        return revision
