"""Answers of Responses, whole and as events, for `scripted_server`."""

from collections.abc import Iterator
from typing import Any

from tests.outside.clients.scripted_answers import SEAL, THOUGHT, Answer

USAGE = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 25,
}
# Of the request, as it came.
RETURNED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
    "truncation",
    "user",
)
DEFAULTS = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled"}


def response_of(body: dict[str, Any], answer: Answer, turn: int) -> dict[str, Any]:
    """The whole answer. Its ids are those of the turn."""
    return _response(body, turn, "completed", _items(answer, turn), USAGE)


def response_events(body: dict[str, Any], answer: Answer, turn: int) -> Iterator[dict[str, Any]]:
    """The answer's events, numbered."""
    for number, event in enumerate(_events(body, answer, turn)):
        yield {**event, "sequence_number": number}


def _events(body: dict[str, Any], answer: Answer, turn: int) -> Iterator[dict[str, Any]]:
    started = _response(body, turn, "in_progress", [], None)
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    items = _items(answer, turn)
    for index, item in enumerate(items):
        emptied: dict[str, Any] = {"content": [], "arguments": "", "input": "", "encrypted_content": None}
        begun = {**item, **{name: emptied[name] for name in emptied if name in item}, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        place = {"output_index": index, "item_id": item["id"]}
        for event in _parts(item):
            yield {**event, **place}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": _response(body, turn, "completed", items, USAGE)}


def _parts(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is written of one item between its first and its last event."""
    if item["type"] == "function_call":
        kind, end = "response.function_call_arguments", {"arguments": item["arguments"], "name": item["name"]}
        yield {"type": f"{kind}.delta", "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **end}
    elif item["type"] == "custom_tool_call":
        yield {"type": "response.custom_tool_call_input.delta", "delta": item["input"]}
        yield {"type": "response.custom_tool_call_input.done", "input": item["input"]}
    else:
        [part] = item["content"]
        text, place = part["text"], {"content_index": 0}
        scores: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **place}
        yield {"type": f"response.{part['type']}.delta", "delta": text, **scores, **place}
        yield {"type": f"response.{part['type']}.done", "text": text, **scores, **place}
        yield {"type": "response.content_part.done", "part": part, **place}


def _items(answer: Answer, turn: int) -> list[dict[str, Any]]:
    content = [{"type": "reasoning_text", "text": answer.thought or THOUGHT}]
    thought = {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": content}
    items: list[dict[str, Any]] = [{**thought, "encrypted_content": SEAL, "status": "completed"}]
    called = {"call_id": f"call_{turn}", "name": answer.name, "status": "completed"}
    if answer.namespace is not None:
        called["namespace"] = answer.namespace
    if answer.name is None:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": [part]})
    elif answer.custom:
        items.append({"type": "custom_tool_call", "id": f"ctc_{turn}", **called, "input": answer.text})
    else:
        items.append({"type": "function_call", "id": f"fc_{turn}", **called, "arguments": answer.text})
    return items


def _response(
    body: dict[str, Any], turn: int, status: str, output: list[dict[str, Any]], usage: Any
) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if name in RETURNED and value is not None}
    returned = {**dict.fromkeys(RETURNED), **DEFAULTS, **given}
    fixed = {"object": "response", "created_at": 1, "error": None, "incomplete_details": None, "store": False}
    return {**returned, **fixed, "id": f"resp_{turn}", "status": status, "output": output, "usage": usage}
