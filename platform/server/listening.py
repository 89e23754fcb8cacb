"""Binds the sockets of a server before anything else starts, and says where they are reached.

Invariant: this module imports nothing that takes time, so that a taken port is reported at once.
"""

import errno
import socket

from loraplex.platform.startup_errors import PortTaken


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Bind a socket that does not listen yet, so that a taken port is known before anything is loaded.

    Raises `PortTaken`, which names `flag`.
    """
    try:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise PortTaken(host, port, str(error), flag) from None
    if port and _is_listening(facts[0], facts[4]):
        raise PortTaken(host, port, "the port is taken by another process", flag)
    listener = socket.socket(facts[0], socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(facts[4])
    except OSError as error:
        listener.close()
        reason = "the port is taken by another process" if error.errno == errno.EADDRINUSE else error.strerror
        raise PortTaken(host, port, reason or str(error), flag) from None
    return listener


def _is_listening(family: int, address: tuple[object, ...]) -> bool:
    """Whether a process listens at `address`. Linux lets two processes bind one port while neither listens."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(address) == 0


def root_url(host: str, port: int, scheme: str = "http") -> str:
    """The address of a server that listens on `host`; a wildcard address is reached through loopback."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"
