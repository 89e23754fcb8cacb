"""What a client of Anthropic reads: events and bodies, checked against the types of the `anthropic` package."""

import json
from collections.abc import Iterable
from typing import Any, Final

from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from loraplex.platform.web.anthropic.response_models import MessageDocument

MODEL: Final = "demo/base"
HELLO: Final[Any] = [{"role": "user", "content": "hello"}]
WEATHER: Final[Any] = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
EVENT: Final[TypeAdapter[Any]] = TypeAdapter(RawMessageStreamEvent)
MESSAGE: Final = TypeAdapter(Message)
MODEL_INFO: Final = TypeAdapter(ModelInfo)
ERROR: Final = TypeAdapter(ErrorResponse)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}


def events_of(stream: str) -> list[dict[str, Any]]:
    """The data of every event; each is one of the package's types, a ping, or an error."""
    found = []
    for event in stream.split("\n\n")[:-1]:
        named, data = event.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert named == f"event: {document['type']}"
        if document["type"] == "error":
            known(ERROR.validate_json(data.removeprefix("data: ")))
        elif document["type"] != "ping":
            known(EVENT.validate_json(data.removeprefix("data: ")))
        found.append(document)
    return found


def message_of(content: bytes | str) -> dict[str, Any]:
    """A whole message that is one of the package's type, and as the OpenAPI document has it."""
    known(MESSAGE.validate_json(content))
    assert json.loads(MessageDocument.model_validate_json(content).model_dump_json()) == json.loads(content)
    document: dict[str, Any] = json.loads(content)
    return document


def known(document: Any) -> None:
    """Every name is one that the package's types have."""
    if isinstance(document, BaseModel):
        assert not document.model_extra, document.model_extra
        known(list(document.__dict__.values()))
    elif isinstance(document, list):
        for each in document:
            known(each)


def added_up(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message as the package's own stream helper accumulates it."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        if event["type"] not in ("ping", "error"):
            snapshot = accumulate_event(
                event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    return without_ids(snapshot.to_dict())


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two runs, and without null."""
    blocks = [
        {
            name: value
            for name, value in block.items()
            if name not in ("id", "signature") and value is not None
        }
        for block in message["content"]
    ]
    kept = {name: value for name, value in message.items() if name != "id" and value is not None}
    return {**kept, "content": blocks}
