"""Answers of Messages, whole and as events, for `scripted_server`."""

import json
from collections.abc import Iterator
from typing import Any

from tests.outside.clients.scripted_answers import SEAL, THOUGHT, Answer

USAGE = {"input_tokens": 15, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5}
OUTPUT_TOKENS = 5


def message_of(body: dict[str, Any], answer: Answer, turn: int) -> dict[str, Any]:
    """The whole answer. Its ids are those of the turn."""
    usage = {**USAGE, "output_tokens": OUTPUT_TOKENS}
    return {**_message(body, turn), "content": _blocks(answer, turn), **_stop(answer), "usage": usage}


def message_events(body: dict[str, Any], answer: Answer, turn: int) -> Iterator[dict[str, Any]]:
    """The answer's events."""
    usage = {**USAGE, "output_tokens": 1}
    begun = {**_message(body, turn), "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": usage}}
    yield {"type": "ping"}
    for index, block in enumerate(_blocks(answer, turn)):
        match block["type"]:
            case "thinking":
                begun = {"thinking": "", "signature": ""}
                deltas = [{"type": f"{name}_delta", name: block[name]} for name in begun]
            case "tool_use":
                begun = {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            case _:
                begun = {"text": ""}
                deltas = [{"type": "text_delta", "text": block["text"]}]
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **begun}}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    # langchain-anthropic reads the prompt's tokens here alone.
    usage = {**USAGE, "output_tokens": OUTPUT_TOKENS}
    yield {"type": "message_delta", "delta": _stop(answer), "usage": usage}
    yield {"type": "message_stop"}


def _message(body: dict[str, Any], turn: int) -> dict[str, Any]:
    return {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": body["model"]}


def _stop(answer: Answer) -> dict[str, Any]:
    return {"stop_reason": "end_turn" if answer.name is None else "tool_use", "stop_sequence": None}


def _blocks(answer: Answer, turn: int) -> list[dict[str, Any]]:
    thought = answer.thought or THOUGHT
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": thought, "signature": SEAL}]
    if answer.name is None:
        blocks.append({"type": "text", "text": answer.text})
    else:
        called = {"type": "tool_use", "id": f"toolu_{turn}", "name": answer.name}
        blocks.append({**called, "input": json.loads(answer.text)})
    return blocks
