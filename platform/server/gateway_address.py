"""Where the gateways of a data directory listen, for commands that run beside them.

Invariant: a file counts while its gateway has it locked (flock), so that of a killed gateway misleads no command.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Final

import msgspec

from loraplex.platform.datastores.embedded.lock import try_flock

FOLDER: Final = "gateways"


class GatewayAddress(msgspec.Struct, frozen=True):
    """`base_url`: of the gateway, for this machine. `console_url`: the root of links to the console; None without one."""

    base_url: str
    console_url: str | None


@contextmanager
def announced(data_dir: Path, address: GatewayAddress) -> Iterator[None]:
    """Let commands find this gateway until the context ends."""
    folder = data_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    running_gateways(data_dir)  # so that killed ones leave no file for each of their starts
    descriptor, draft = mkstemp(dir=folder)
    file = Path(f"{draft}.json")
    try:
        # Locked before it has its name: no reader takes it for that of a killed gateway.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, msgspec.json.encode(address))
        os.rename(draft, file)
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def running_gateways(data_dir: Path) -> list[GatewayAddress]:
    """Return the addresses of the gateways that run on a data directory, and remove the files of killed ones."""
    running = []
    for path in (data_dir / FOLDER).glob("*.json"):
        # A file may go while it is looked for. Another user's is not for this process, nor is it its to remove.
        with suppress(FileNotFoundError, PermissionError), path.open("rb") as file:
            if try_flock(file.fileno(), fcntl.LOCK_SH):
                path.unlink()
            else:
                running.append(msgspec.json.decode(file.read(), type=GatewayAddress))
    return running
