"""Short paths to deep folders, because the path of a unix socket has at most 107 bytes.

Invariant: the socket itself stays in the data directory; a new private folder (mkdtemp, mode 0700) contains links to it.
"""

import os
import shutil
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
PREFIX = "loraplex-"


class ShortFolder:
    """Links to folders, and copies of binaries that the unprivileged user cannot reach. `remove` deletes them."""

    def __init__(self, previous: Path | None = None) -> None:
        """`previous`: the folder of an owner that has ended. Its path is used again, so that addresses stay the same."""
        self._path: Path | None = None
        self._previous = None if previous is None or is_foreign(previous) else previous
        if self._previous is not None:
            remove_short_folder(self._previous)

    @property
    def path(self) -> Path | None:
        return self._path

    def make(self, mode: int = 0o700) -> Path:
        if self._path is None and self._previous is not None and not self._previous.exists():
            self._previous.mkdir(mode=0o700)
            self._path = self._previous
        if self._path is None:
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._path.chmod(self._path.stat().st_mode | mode)
        return self._path

    def shorten(self, folder: Path, socket_name: str) -> Path:
        """A path to `folder` that is short enough for the socket and safe inside a URL."""
        if len(str(folder / socket_name).encode()) <= MAX_SOCKET_PATH_BYTES and is_plain(folder):
            return folder
        link = self.make() / folder.name
        if not link.is_symlink():
            link.symlink_to(folder)
        return link

    def remove(self) -> None:
        if self._path is not None:
            remove_short_folder(self._path)
            self._path = None


def is_foreign(path: Path) -> bool:
    """Whether the path is not that of a folder which this class creates, or another user has it now."""
    if path.parent != Path(tempfile.gettempdir()) or not path.name.startswith(PREFIX):
        return True
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid()


def is_plain(path: Path) -> bool:
    return all(
        character.isascii() and (character.isalnum() or character in "/._-") for character in str(path)
    )


def remove_short_folder(path: Path) -> None:
    """Remove a folder that this class created, also one of a killed owner. Other folders and files are kept."""
    if not is_foreign(path) and path.exists():
        shutil.rmtree(path)
