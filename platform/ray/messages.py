"""Messages between a gateway and an engine replica on Ray Serve: msgpack structs in plain bytes.

Invariant: Ray pickles the envelope of a call, and nothing of a tenant: what a call carries of a request is in these bytes.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, TypeAlias
from uuid import UUID

import msgspec

from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Event,
    Finished,
    ProbeReport,
    Usage,
)
from loraplex.platform.engines.prefix_index import PromptPrefix

WAITED: Final = "waited_s"
"""Argument of a replica's `generate`: seconds that the request has waited at its gateway, which the router knows at last."""


class Placing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the router reads of a request. `prefixes`: of the prompt, the longest last.

    `avoid`: replicas that refused it, or lost their engine a moment ago. `since`: when the gateway had it, by the monotonic
    clock of its process.
    """

    namespace: bytes
    adapter: str | None = None
    prefixes: list[PromptPrefix] = []
    avoid: list[str] = []
    since: float = 0.0


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Its adapter is that of `tenant_id` in the configured storage; the path in it is the gateway's own."""

    request: EngineRequest
    tenant_id: UUID | None = None


class ProbeCall(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to probe: that of `tenant_id` in storage, or `config` with weights that the call carries beside it."""

    adapter: AdapterRef
    tenant_id: UUID | None = None
    config: bytes | None = None


class Probed(msgspec.Struct, frozen=True):
    """The result of a probe. `report` None: the probe could not run, and `message` gives the reason.

    `lost_by`: the replica, if its engine was lost while it ran the probe.
    """

    report: ProbeReport | None
    message: str = ""
    lost_by: str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """The first message of a stream: the replica that has the request."""

    replica_id: str


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's state, with the names of `ManagedEngine`. `at`: when it was made, by the replica's clock."""

    info: EngineInfo
    stats: EngineStats | None
    at: datetime
    restarts: int = 0
    deaths: int = 0
    failure: str | None = None


Reply: TypeAlias = Accepted | list[Event]

encode: Final = msgspec.msgpack.Encoder().encode
decode_placing: Final[Callable[[bytes], Placing]] = msgspec.msgpack.Decoder(Placing).decode
decode_submission: Final[Callable[[bytes], Submission]] = msgspec.msgpack.Decoder(Submission).decode
decode_probe_call: Final[Callable[[bytes], ProbeCall]] = msgspec.msgpack.Decoder(ProbeCall).decode
decode_probed: Final[Callable[[bytes], Probed]] = msgspec.msgpack.Decoder(Probed).decode
decode_reply: Final[Callable[[bytes], Reply]] = msgspec.msgpack.Decoder(Reply).decode
decode_report: Final[Callable[[bytes], ReplicaReport]] = msgspec.msgpack.Decoder(ReplicaReport).decode


def never_run(request: EngineRequest) -> Iterator[Event]:
    """The events of a request that was aborted before an engine had it."""
    return (Finished(request.request_id, n, "abort", Usage(0, 0, 0)) for n in request.open_choices)
