"""Responses and their events as bytes, checked against the types of `openai` and of Open Responses."""

import json
from typing import Any, Final

import openresponses_types as spec
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

PATH: Final = "/v1/responses"
MODEL: Final = "demo/base"
_RESPONSE: Final = TypeAdapter(Response)
_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)
_SPEC: Final[dict[str, type[BaseModel]]] = {
    "response.created": spec.ResponseCreatedStreamingEvent,
    "response.in_progress": spec.ResponseInProgressStreamingEvent,
    "response.completed": spec.ResponseCompletedStreamingEvent,
    "response.incomplete": spec.ResponseIncompleteStreamingEvent,
    "response.failed": spec.ResponseFailedStreamingEvent,
    "response.output_item.added": spec.ResponseOutputItemAddedStreamingEvent,
    "response.output_item.done": spec.ResponseOutputItemDoneStreamingEvent,
    "response.content_part.added": spec.ResponseContentPartAddedStreamingEvent,
    "response.content_part.done": spec.ResponseContentPartDoneStreamingEvent,
    "response.output_text.delta": spec.ResponseOutputTextDeltaStreamingEvent,
    "response.output_text.done": spec.ResponseOutputTextDoneStreamingEvent,
    "response.function_call_arguments.delta": spec.ResponseFunctionCallArgumentsDeltaStreamingEvent,
    "response.function_call_arguments.done": spec.ResponseFunctionCallArgumentsDoneStreamingEvent,
    "error": spec.ErrorStreamingEvent,
}
# Open Responses knows neither custom tools and namespaces, nor a schema in the format that a response repeats, nor two efforts that
# `openai` has: a response repeats what was asked.
_NOT_IN_SPEC: Final = ('"custom', '"namespace"', '"json_schema"', '"effort":"minimal"', '"effort":"max"')


def checked_response(body: bytes) -> dict[str, Any]:
    """The response object, after both packages have parsed it strictly."""
    _RESPONSE.validate_json(body, strict=True)
    if _is_in_spec(body):
        spec.ResponseResource.model_validate_json(body)
    document: dict[str, Any] = json.loads(body)
    assert document["store"] is False
    return document


def _is_in_spec(document: bytes) -> bool:
    compact = document.decode().replace(": ", ":")
    return not any(each in compact for each in _NOT_IN_SPEC)


def checked_events(stream: bytes) -> list[dict[str, Any]]:
    """All events of a stream, after both packages have parsed them; they are numbered from 0."""
    *blocks, rest = stream.split(b"\n\n")
    assert rest == b""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split(b"\n")
        assert data.startswith(b"data: ")
        data = data.removeprefix(b"data: ")
        event = json.loads(data)
        kind = event["type"]
        assert name == b"event: " + kind.encode() and event["sequence_number"] == number
        parsed = _EVENT.validate_json(data)
        assert parsed.type == kind
        if kind in _SPEC and _is_in_spec(data):
            _SPEC[kind].model_validate_json(data)
        if "response" in event:
            checked_response(json.dumps(event["response"]).encode())
        events.append(event)
    return events


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that the deltas of a stream add up to, checked against those of its `done` events."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
            continue
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            item = event["item"]
            whole = item.get("arguments", item.get("input"))
            assert texts[-1] == (item["content"][0]["text"] if whole is None else whole)
            assert item["id"] == items[-1]["id"] and item["type"] == items[-1]["type"]
            items[-1] = item
        else:
            assert event["item_id"] == items[-1]["id"]
            texts[-1] += event.get("delta", "")
    assert all(item["status"] != "in_progress" for item in items)
    return items


def without_ids(document: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    output = [
        {name: each for name, each in item.items() if name not in ("id", "call_id", "encrypted_content")}
        for item in document["output"]
    ]
    rest = {name: each for name, each in document.items() if name not in ("id", "created_at", "completed_at")}
    return {**rest, "output": output}
