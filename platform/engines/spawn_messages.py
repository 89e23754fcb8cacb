"""Messages between a parent and its engine process: a spawn request, one JSON line on standard input, and reports as JSON lines.

Invariant: they contain no secret, and nothing of them appears on the command line.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from loraplex.engine.config import EngineConfig
from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import EngineInfo


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process runs. `fake` replaces the model with a script, for fault injection. `drain_s` bounds the drain.

    `processors`: the logical ones that it may use; all where none is named. `data_dir`: has its log file; None: it has none.
    """

    address: str
    parent_pid: int
    config: EngineConfig
    fake: FakeScript | None = None
    processors: frozenset[int] = frozenset()
    drain_s: float = 30.0
    log_level: str = "info"
    data_dir: str | None = None


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A stage of the start, as text for people."""

    text: str


class Described(msgspec.Struct, frozen=True, tag="described"):
    """What the engine will serve: sent before its weights are read, so that the gateway prepares itself meanwhile."""

    info: EngineInfo


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The stage goes on: the process computed or read since its last report."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The socket is open and the engine takes requests."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The start failed; the process ends."""

    reason: str


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The process ends because a gateway asked it to drain: it is not to be started again."""


Report: TypeAlias = Stage | Described | Progress | Ready | Broken | Drained

encode: Final = msgspec.json.Encoder().encode
decode_spawn: Final = msgspec.json.Decoder(SpawnRequest).decode
decode_report: Final[Callable[[bytes], Report]] = msgspec.json.Decoder(Report).decode
