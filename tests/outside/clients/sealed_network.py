"""Runs a program in a network of its own, in which one server on loopback is all that there is.

Run as a script it is the inside: it sends its listening socket out and becomes the program.
Invariant: the program's network has no other way out than that socket.
"""

import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

SET_FLAGS, UP = 0x8914, 0x1
CHUNK = 65_536
UNSHARE = ("unshare", "--map-root-user", "--net")
ADDRESS = "CLIENT_BASE_URL"


def can_seal() -> bool:
    """Whether this machine lets its user make networks."""
    if shutil.which(UNSHARE[0]) is None:
        return False
    return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0


def run_sealed(
    command: Sequence[str], variables: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """The command's end. The server of its variable `CLIENT_BASE_URL` is reached at an address of the inside."""
    server = urlsplit(variables[ADDRESS])
    outside, inside = socket.socketpair()
    with outside:
        relay = threading.Thread(target=_relay, args=(outside, (server.hostname, server.port)), daemon=True)
        relay.start()
        with inside:
            entry = [sys.executable, __file__, str(inside.fileno())]
            done = subprocess.run(
                [*UNSHARE, *entry, *command],
                env=dict(variables),
                check=False,
                pass_fds=[inside.fileno()],
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        relay.join()
    return done


def _relay(outside: socket.socket, server: tuple[str | None, int | None]) -> None:
    """Connect each connection of the inside to the server, until the inside is gone."""
    _, listening, _, _ = socket.recv_fds(outside, 1, 1)
    if not listening:
        return
    with socket.socket(fileno=listening[0]) as listener:
        while outside not in select.select([listener, outside], [], [])[0]:
            connection, _ = listener.accept()
            upstream = socket.create_connection(server)
            for pair in ((connection, upstream), (upstream, connection)):
                threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(CHUNK):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)


def _become(descriptor: int, command: list[str]) -> None:
    """Bring loopback up, listen there, tell the outside, and become the command."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
    with socket.socket(fileno=descriptor) as outside, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        socket.send_fds(outside, [b"1"], [listener.fileno()])
    address = urlsplit(os.environ[ADDRESS])._replace(netloc=f"127.0.0.1:{port}").geturl()
    os.execvpe(command[0], command, {**os.environ, ADDRESS: address})


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
