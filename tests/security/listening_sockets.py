"""The sockets on which a tree of processes listens, as Linux lists them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

LISTENS: Final = "0A"
"""The state of a TCP socket in /proc/net/tcp."""
ACCEPTS: Final = 0x10000
"""The flag of a unix socket in /proc/net/unix."""


@dataclass(frozen=True)
class Port:
    """An address of the network on which a process takes connections or datagrams."""

    protocol: str
    address: str
    number: int


def listening_ports(pids: Iterable[int]) -> set[Port]:
    """Return the TCP ports that any of the processes listens on, and all its UDP ports."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    return {
        Port(table, _address(local), int(local.rpartition(":")[2], 16))
        for table in ("tcp", "tcp6", "udp", "udp6")
        for _, local, _, state, _, _, _, _, _, inode, *_ in _rows(table)
        if inode in inodes and (state == LISTENS or table.startswith("udp"))
    }


def listening_paths(pids: Iterable[int]) -> set[Path]:
    """Return the files of the unix sockets that any of the processes listens on; `@…` for one without a file."""
    found = set()
    for pid in pids:
        inodes = _socket_inodes(pid)
        for _, _, _, flags, _, _, inode, *name in _rows("unix"):
            if inode in inodes and int(flags, 16) & ACCEPTS:
                found.add(_path(pid, name[0] if name else "@unnamed"))
    return found


def _path(pid: int, name: str) -> Path:
    if name.startswith("@"):
        return Path(name)
    own = name.removeprefix("/proc/self/cwd/")
    return Path(f"/proc/{pid}/cwd").resolve() / own


def _socket_inodes(pid: int) -> set[str]:
    """Of a process that has ended, as those of PostgreSQL's maintenance do, none."""
    inodes, descriptors = set[str](), list[Path]()
    with suppress(FileNotFoundError, ProcessLookupError):
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _rows(table: str) -> Iterator[list[str]]:
    lines = Path(f"/proc/net/{table}").read_text().splitlines()
    yield from (line.split() for line in lines[1:])


def _address(local: str) -> str:
    digits = bytes.fromhex(local.partition(":")[0])
    words = b"".join(digits[at : at + 4][::-1] for at in range(0, len(digits), 4))
    return str(IPv4Address(words) if len(words) == 4 else IPv6Address(words))
