"""Ports for servers whose address has to be known before they start, or kept over restarts."""

import socket
from contextlib import ExitStack


def free_ports(number: int) -> list[int]:
    """Different ports of the loopback interface that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]
