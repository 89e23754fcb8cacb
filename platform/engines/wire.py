"""What gateway and engine process say to each other: msgpack structs (never pickle) in single ZeroMQ frames.

A gateway says `Hello` once per connection and `Ping` every second; an engine that does not know a peer answers
`Goodbye`, upon which the gateway fails what it had running there and says `Hello` again.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from loraplex.engine.messages import AdapterRef, EngineInfo, EngineRequest, EngineStats, Event, ProbeReport
from loraplex.platform.startup_errors import SettingsError

PROTOCOL_VERSION: Final = 2
PING_INTERVAL_S: Final = 1.0
PEER_TIMEOUT_S: Final = 5.0
ACKNOWLEDGE_S: Final = 1.0
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
    """Try an adapter; answered with `Probed` of the same id."""

    probe_id: str
    adapter: AdapterRef


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """A tenant was deleted; answered with `Forgotten` of the same namespace."""

    namespace: bytes


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Keeps the peer alive; answered with `Pong` of the same number."""

    number: int


ToEngine: TypeAlias = Hello | Submit | Abort | Forget | Probe | Ping


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The peer is known from here on."""

    protocol: int
    info: EngineInfo


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The engine knows no such peer, or speaks another protocol; nothing of the peer runs here."""

    reason: str


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Everything that happened to a peer's requests since the last message, in order."""

    events: list[Event]


class Aborted(msgspec.Struct, frozen=True, tag="aborted"):
    """The request no longer runs, or never did."""

    request_id: str


class Probed(msgspec.Struct, frozen=True, tag="probed"):
    """`report` None: nothing was found out, and `message` says why."""

    probe_id: str
    report: ProbeReport | None
    message: str = ""


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """Nothing of the tenant is kept but what still ends."""

    namespace: bytes


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    number: int
    stats: EngineStats


ToGateway: TypeAlias = Welcome | Goodbye | Events | Aborted | Forgotten | Probed | Pong

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_engine: Final[Callable[[bytes], ToEngine]] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_gateway: Final[Callable[[bytes], ToGateway]] = msgspec.msgpack.Decoder(ToGateway).decode


def socket_path(address: str) -> Path:
    """The file behind an `ipc://` address. Raises `SettingsError` for another scheme or too long a path."""
    path = address.removeprefix(SCHEME)
    if path == address or not path.startswith("/"):
        raise SettingsError(f"engine address {address!r}: allowed is {SCHEME}/absolute/path")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise SettingsError(
            f"engine address {address!r}: a unix socket's path holds at most {MAX_SOCKET_PATH} bytes"
        )
    return Path(path)


def private_folder(folder: Path) -> None:
    """Make `folder` (0700) if missing. Raises `SettingsError` if others may enter an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.stat()
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise SettingsError(
            f"{folder}: an engine socket needs a folder that only its owner may enter (mode 0700)"
        )
