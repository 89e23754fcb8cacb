"""Copies the journals of a data directory, also those that gateways write at the same time.

Invariant: a copy is the journal as it was at one moment. A checkpoint writes only pages that are in the log, and the log is
copied after the file, so both together are whole as long as the log did not begin again meanwhile; its header tells
(https://www.sqlite.org/fileformat2.html#the_write_ahead_log).
"""

import shutil
from pathlib import Path
from typing import Final

from loraplex.tenants.errors import JournalUnavailable
from loraplex.tenants.ledger.journal.folder import LOG_SUFFIX, SUFFIX, sync_folder

HEADER_BYTES: Final = 32
MAX_ATTEMPTS: Final = 100


def copy_journals(folder: Path, target_folder: Path) -> list[str]:
    """Copy every journal of `folder` into the existing folder `target_folder`, and return their names.

    One that its gateway drains and removes meanwhile is left out: PostgreSQL has all of it. Raises `JournalUnavailable`.
    """
    copied = [path.name for path in sorted(folder.glob(f"*{SUFFIX}")) if _copy(path, target_folder)]
    sync_folder(target_folder)
    return copied


def _copy(path: Path, target_folder: Path) -> bool:
    log = Path(f"{path}{LOG_SUFFIX}")
    for _ in range(MAX_ATTEMPTS):
        # The log of an attempt before would be replayed over a file that its gateway has closed since, without a log.
        _discard(path, target_folder)
        try:
            before = _header(log)
            shutil.copy2(path, target_folder / path.name)
            if log.exists():
                shutil.copy2(log, target_folder / log.name)
            if _header(log) == before:
                return True
        except FileNotFoundError:
            if not path.exists():
                _discard(path, target_folder)
                return False
        except OSError as error:
            raise JournalUnavailable(f"the usage journal {path.name} cannot be copied: {error}") from error
    raise JournalUnavailable(f"the usage journal {path.name} changes too fast to be copied; try again")


def _header(log: Path) -> bytes:
    """The start of a log: its salts change when it begins again. Empty without a log."""
    try:
        with log.open("rb") as file:
            return file.read(HEADER_BYTES)
    except FileNotFoundError:
        return b""


def _discard(path: Path, target_folder: Path) -> None:
    for name in (path.name, f"{path.name}{LOG_SUFFIX}"):
        (target_folder / name).unlink(missing_ok=True)
