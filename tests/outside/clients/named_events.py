"""Streams of Responses and Messages, read by the types of the packages, and put together as clients do it."""

import json
from collections.abc import Iterator
from typing import Any

from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


def response_in(stream: str) -> str:
    """The response of the last event, as JSON; its items are those that ended one by one, and have what was written of them."""
    events = [RESPONSE_EVENT.validate_python(event) for event in _events(stream)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    response: dict[str, Any] = events[-1].response.model_dump(by_alias=True)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump(by_alias=True) for item in done] == response["output"]
    for index, item in enumerate(done):
        parts = [event for event in events if getattr(event, "output_index", None) == index]
        written = "".join(event.delta for event in parts if event.type.endswith(".delta"))
        assert written == _written(item), (written, item)
    return json.dumps(response)


def _written(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    return str(item.input) if item.type == "custom_tool_call" else "".join(part.text for part in item.content)


def message_in(stream: str) -> str:
    """The message, as JSON, out of all that was written of it."""
    kinds = [event for event in _events(stream) if event["type"] != "ping"]
    events = [MESSAGE_EVENT.validate_python(event) for event in kinds]
    assert events[0].type == "message_start" and events[-1].type == "message_stop"
    message: dict[str, Any] = events[0].message.model_dump()
    for event in events[1:]:
        if event.type == "content_block_start":
            assert event.index == len(message["content"])
            message["content"].append(event.content_block.model_dump())
            partial = ""
        elif event.type == "content_block_delta":
            block, delta = message["content"][event.index], event.delta
            if delta.type == "input_json_delta":
                partial += delta.partial_json
                block["input"] = partial
            else:
                block[DELTAS[delta.type]] += getattr(delta, DELTAS[delta.type])
        elif event.type == "content_block_stop" and partial:
            message["content"][event.index]["input"] = json.loads(partial)
        elif event.type == "message_delta":
            message |= event.delta.model_dump()
            message["usage"] |= event.usage.model_dump(exclude_none=True)
    return json.dumps(message)


def _events(stream: str) -> Iterator[dict[str, Any]]:
    """Each event's data; its type stands before it too."""
    for lines in stream.strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in lines.split("\n"))
        event: dict[str, Any] = json.loads(data)
        assert event["type"] == name
        yield event
