"""What a parent tells its engine process (one JSON line on standard input) and what that reports back (JSON lines).

Nothing secret is in it, and nothing of it appears on the command line.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.fake_engine import FakeScript


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`fake` replaces the model by a script, for tests and drills. `drain_s` bounds the end after SIGTERM."""

    address: str
    parent_pid: int
    config: EngineConfig
    fake: FakeScript | None = None
    drain_s: float = 30.0
    log_level: str = "info"


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A step of the start, for people."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The socket is open and requests are taken."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The start failed; the process ends."""

    reason: str


Report: TypeAlias = Stage | Ready | Broken

encode: Final = msgspec.json.Encoder().encode
decode_spawn: Final = msgspec.json.Decoder(SpawnRequest).decode
decode_report: Final[Callable[[bytes], Report]] = msgspec.json.Decoder(Report).decode
