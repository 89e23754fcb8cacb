"""Whether a data directory has an installation, for commands that work on one and must not make one."""

import os

from loraplex.platform.config import Settings
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER


def require_installation(settings: Settings, *, files: bool = False) -> None:
    """Raise `DependencyFailed` unless the data directory has the embedded database or, with DATABASE_URL, the journals that each
    gateway keeps beside its adapters. With DATABASE_URL, a command that uses no `files` needs no data directory.
    """
    if settings.database_url is not None and not files:
        return
    mark = f"{SERVICES_FOLDER}/postgres" if settings.database_url is None else JOURNAL_FOLDER
    if not os.access(settings.data_dir / mark, os.F_OK):
        raise DependencyFailed(
            f"no installation there: {settings.data_dir / mark} does not exist or cannot be read; give the --data-dir of its server, "
            "and DATABASE_URL if that has one, or make a new installation with `loraplex serve`"
        )
