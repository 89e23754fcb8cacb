"""Responses and chunks have the fields of their models, and no others."""

from typing import Any

import pytest
from pydantic import BaseModel
from tests.platform.web.openai.streams import CHAT, STREAMS, chunks_of

from loraplex.platform.web.openai.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    TokenCount,
    encoded,
)


def parsed(model: type[BaseModel], text: bytes) -> Any:
    """Parse a response; its fields are those that the model encodes, in the same order."""
    document = model.model_validate_json(text, strict=True, extra="forbid")
    assert encoded(document) == text
    return document


@pytest.mark.parametrize("stream", STREAMS)
async def test_every_chunk_of_a_stream(start_gateway: Any, stream: str) -> None:
    script, path, body = STREAMS[stream]
    gateway = await start_gateway(script)
    chunk = ChatCompletionChunk if path == CHAT else Completion
    chunks = [parsed(chunk, each) for each in await chunks_of(gateway, path, body)]
    with_usage = "stream_options" in body
    assert [("usage" in each.model_fields_set) for each in chunks] == [with_usage] * len(chunks)
    indexes = {choice.index for each in chunks for choice in each.choices}
    assert indexes == set(range(body.get("n", 1) * len(body.get("prompt", [0]))))
    if body.get("logprobs"):
        assert any(choice.logprobs for each in chunks for choice in each.choices)


@pytest.mark.parametrize("stream", STREAMS)
async def test_every_whole_response(start_gateway: Any, stream: str) -> None:
    script, path, body = STREAMS[stream]
    gateway = await start_gateway(script)
    fields = {name: value for name, value in body.items() if name != "stream_options"}
    response = await gateway.post(path, fields)
    document = parsed(ChatCompletion if path == CHAT else Completion, response.content)
    assert document.usage.completion_tokens and all(choice.finish_reason for choice in document.choices)


async def test_models_and_tokens(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "pirate", "a" * 64)
    listed = await gateway.get("/v1/models", [("authorization", f"Bearer {gateway.key}")])
    base, adapter = parsed(ModelList, listed.content).data
    assert (base.root, base.parent, adapter.root, adapter.parent) == (base.id, None, "pirate@1", base.id)
    one, several = [
        parsed(TokenCount, (await gateway.post("/v1/tokenize", {"model": base.id, "prompt": prompt})).content)
        for prompt in ("a", ["a", "b c"])
    ]
    assert one.count == len(one.tokens) > 0
    assert several.tokens[0] == one.tokens and several.count == sum(map(len, several.tokens))
