"""What every object and chunk of one answer shares: id, kind, time and model, encoded once per answer."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """`created` in seconds of the Unix epoch."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prefix(self, kind: str) -> bytes:
        """The beginning of an SSE event, up to the comma after these fields."""
        return b"data: " + msgspec.json.encode(self.fields(kind))[:-1] + b","


def event_of(chunk: dict[str, object]) -> bytes:
    """One whole SSE event."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
