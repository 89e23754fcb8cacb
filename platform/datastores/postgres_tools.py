"""Runs pg_dump and pg_restore of the bundled PostgreSQL on a database.

Invariant: passwords travel in the environment of the child alone, never in its arguments.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL

TOOL_SECONDS: Final = 3600.0
_VARIABLES: Final = {
    "host": "PGHOST",
    "port": "PGPORT",
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
}


def run_pg_dump(program: Path, address: URL, file: Path) -> None:
    """Write a database to a new file of mode 0600 in the custom format, and sync it.

    Raises `OSError`, `subprocess.SubprocessError`.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        _run([str(program), "--format=custom", "--no-password"], address, stdout=output)
        os.fsync(output.fileno())


def run_pg_restore(program: Path, address: URL, file: Path, owner: str) -> None:
    """Restore a dump as a whole or not at all. `owner`: the role that owns everything afterwards.

    Raises `OSError`, `subprocess.SubprocessError`.
    """
    options = ("--single-transaction", "--exit-on-error", "--no-password", "--no-owner", f"--role={owner}")
    database = f"--dbname={address.database}"
    _run([str(program), *options, database, str(file)], address, stdout=subprocess.DEVNULL)


def failure_reason(error: OSError | subprocess.SubprocessError) -> str:
    """The first line that a failed program wrote, or what else went wrong."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[0] if lines else f"{Path(error.cmd[0]).name} ended with status {error.returncode}"
    return str(error)


def _run(command: Sequence[str], address: URL, *, stdout: Any) -> None:
    subprocess.run(
        command,
        env=_environment(address),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=TOOL_SECONDS,
        check=True,
    )


def _environment(address: URL) -> dict[str, str]:
    """The address as libpq's variables. A path in the query is the folder of a unix socket."""
    given = {
        "PGHOST": address.host,
        "PGPORT": None if address.port is None else str(address.port),
        "PGUSER": address.username,
        "PGPASSWORD": address.password,
        "PGDATABASE": address.database,
    }
    given |= {_VARIABLES[name]: str(value) for name, value in address.query.items() if name in _VARIABLES}
    return {name: value for name, value in given.items() if value is not None}
