"""Messages between gateway and engine process: msgpack structs (never pickle) in single ZeroMQ frames.

A gateway sends `Hello` once per connection and `Ping` every second. An engine that does not know a peer sends `Goodbye`;
the gateway then fails its running requests and sends `Hello` again.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from loraplex.engine.messages import AdapterRef, EngineInfo, EngineRequest, EngineStats, Event, ProbeReport
from loraplex.platform.startup_errors import SettingsError

PROTOCOL_VERSION: Final = 3
PING_INTERVAL_S: Final = 1.0
PEER_TIMEOUT_S: Final = 5.0
MAX_MESSAGE_BYTES: Final = 64 << 20
MAX_SOCKET_PATH: Final = 107
SCHEME: Final = "ipc://"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a gateway."""

    protocol: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Probe an adapter; the reply is `Probed` with the same id."""

    probe_id: str
    adapter: AdapterRef


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """A tenant was deleted; the reply is `Forgotten` with the same namespace."""

    namespace: bytes


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keeps the peer alive; the reply is `Pong` with the same number."""

    number: int


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The engine takes no new request, ends those that are open after `grace_s`, and ends its process; all gateways see it."""

    grace_s: float


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """The gateway has read `Goodbye` of an engine that drained, and all events before it: the engine's process may end."""


ToEngine: TypeAlias = Hello | Submit | Abort | Forget | Probe | Ping | Drain | Farewell


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The engine knows the peer from now on. `instance` identifies the engine's process."""

    protocol: int
    info: EngineInfo
    instance: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The engine does not know the peer, or has another protocol version; no request of the peer runs here.

    `drained`: its process ends, and nothing died with it.
    """

    reason: str
    drained: bool = False


class Events(msgspec.Struct, frozen=True, tag="events"):
    """All events of a peer's requests since the last message, in order."""

    events: list[Event]


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The request does not run any more, or never ran. Its last events, with the usage, were sent before."""

    request_id: str


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """Result of a probe. `report` None: the probe could not run, and `message` gives the reason."""

    probe_id: str
    report: ProbeReport | None
    message: str = ""


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """The engine keeps nothing of the tenant, except requests that are still ending."""

    namespace: bytes


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int
    stats: EngineStats


ToGateway: TypeAlias = Welcome | Goodbye | Events | Aborted | Forgotten | Probed | Pong

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_engine: Final[Callable[[bytes], ToEngine]] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_gateway: Final[Callable[[bytes], ToGateway]] = msgspec.msgpack.Decoder(ToGateway).decode


def socket_path(address: str) -> Path:
    """The file of an `ipc://` address. Raises `SettingsError` for another scheme or a path that is too long."""
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/"):
        raise SettingsError(f"engine address {address!r}: allowed is {SCHEME}/absolute/path")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise SettingsError(
            f"engine address {address!r}: a unix socket's path has at most {MAX_SOCKET_PATH} bytes"
        )
    return Path(path)


def private_folder(folder: Path) -> None:
    """Create `folder` (0700) if it is missing. Raises `SettingsError` if other users may enter an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise SettingsError(
            f"{folder}: an engine socket needs a folder that only its owner may enter (mode 0700)"
        )
