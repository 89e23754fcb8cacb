"""What a tenant lets this installation keep of its requests, as the API has it."""

from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from pydantic import ConfigDict, Field

from loraplex.tenants.records import Record

MAX_RECORDED_BYTES: Final = 256 << 20
"""Of all recorded requests of a tenant together, as they are stored; beyond it the oldest are deleted."""


class RecordRequests(Record):
    """`percent`: of the chat completions, drawn at random. Of more than `max_requests` the oldest are deleted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    percent: int = Field(ge=1, le=100)
    retention_days: int = Field(ge=1, le=90)
    max_requests: int = Field(ge=1, le=10_000)


class NewRecording(NamedTuple):
    """A request to keep. `content` is encrypted for `id`; `adapter` None: of the base model."""

    id: UUID
    adapter: str | None
    base_digest: str
    created_at: datetime
    content: bytes


class DataPolicyDocument(Record):
    """`record_requests` null: no request is recorded, and none that was is kept. `recorded`: those that are kept now."""

    record_requests: RecordRequests | None
    recorded: int
    revision: int = Field(default=1, exclude=True)
