"""Network namespaces of their own for tests with Ray, whose processes listen on all addresses of a machine.

Invariant: nothing here imports Ray, which takes seconds.
"""

import fcntl
import os
import secrets
import socket
import struct
import subprocess
import sys
from pathlib import Path

from loraplex.platform.processes.environment import code_environment

SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
IN_NAMESPACE = (
    ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net")
)
"""Root needs no user namespace, in which it could not open the sockets of other users."""


def may_make_namespaces() -> bool:
    return subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


def namespaced(module: str, *arguments: str) -> list[str]:
    """The command of a Python module in a network namespace of its own."""
    return [*IN_NAMESPACE, sys.executable, "-m", module, *arguments]


def ray_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that starts or joins the cluster: token authentication, no reports, short paths."""
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        **code_environment(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
