"""The embedded Valkey: one foreground server on a unix socket inside its own 0700 folder, with a password and no TCP port.

Invariant: its configuration is sent over standard input, so the password is in no argument list and only in the file of loraplex.
"""

import signal
import time
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from loraplex.platform.datastores.embedded.child import Child, ChildCommand, ChildServer
from loraplex.platform.datastores.embedded.errors import ServiceFailed
from loraplex.platform.datastores.embedded.identity import Identity, own_folder
from loraplex.platform.datastores.embedded.passwords import kept_password

SOCKET_NAME = "valkey.sock"
PASSWORD = "valkey.password"
START_SECONDS = 30.0
STOP_STEPS = ((signal.SIGTERM, 10.0),)
CONFIGURATION = """\
port 0
unixsocket {socket}
unixsocketperm 700
requirepass {password}
daemonize no
dir ./
save ""
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
"""


class ValkeyServer(ChildServer):
    """Starts and stops one server."""

    name = "Valkey"
    socket_name = SOCKET_NAME
    stop_steps = STOP_STEPS

    def __init__(self, folder: Path, binary: Path, identity: Identity) -> None:
        """`folder` is an existing folder of the embedded services; the data is in `folder/valkey`."""
        super().__init__()
        self.data = folder / "valkey"
        self._password = password = kept_password(folder / PASSWORD)
        self._command = ChildCommand(
            *(self.name, (str(binary), "-"), self.data, folder / "valkey.log", identity, signal.SIGKILL),
            remedy=f"move {self.data} away: counters are rebuilt from PostgreSQL",
            standard_input=CONFIGURATION.format(socket=SOCKET_NAME, password=password),
        )

    def start(self, socket_folder: Path) -> str:
        """Start the server and return its URL. `socket_folder` is a path to the data folder short enough for a unix socket."""
        own_folder(self.data, self._command.identity)
        (self.data / SOCKET_NAME).unlink(missing_ok=True)
        self._child = Child(self._command)
        url = f"unix://:{self._password}@{socket_folder / SOCKET_NAME}?db=0"
        self._wait_ready(self._child, url)
        return url

    def _wait_ready(self, child: Child, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            child.check_running()
            if time.monotonic() > deadline:
                raise child.failure(f"did not respond within {START_SECONDS:g} s")
            time.sleep(0.01)


def answers(url: str) -> bool:
    """Whether a server at `url` responds to PING within a second. Raises `ServiceFailed` when it rejects the password."""
    client = redis.Redis.from_url(url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    try:
        return bool(client.ping())
    except redis.AuthenticationError as error:
        raise ServiceFailed("Valkey rejects the password of this data directory") from error
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    finally:
        client.close()
