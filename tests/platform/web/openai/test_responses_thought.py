"""Thought in responses: items and events of their own, counted, and found in the cache when a client sends them back sealed."""

from itertools import pairwise
from typing import Any

import pytest
from tests.platform.web.openai.responses_events import MODEL, PATH, checked_events, checked_response, replayed
from tests.platform.web.openai.test_thought import BEGUN, chat_tokenizer, ids

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.parameters.request_models import EFFORTS
from loraplex.tenants.registry.records import AdapterProfile

__all__ = ["chat_tokenizer", "ids"]

SEALED: Any = {"include": ["reasoning.encrypted_content"], "store": False, "reasoning": {"effort": "low"}}


async def test_sealed_thought_comes_back_over_turns(
    start_gateway: Any, chat_tokenizer: Any, ids: dict[str, int]
) -> None:
    gateway = await start_gateway(FakeScript(answers=(BEGUN,), token_ids=ids))
    items: list[Any] = [{"role": "user", "content": "hello"}]
    for _ in range(3):
        async with gateway.client().responses.stream(model=MODEL, input=items, **SEALED) as stream:
            types = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert types.count("response.reasoning_text.done") == types.count("response.output_text.done") == 1
        thought, message = response.output
        assert thought.content[0].text == "I see. So" and message.content[0].text == "It is 4"
        assert "I see" not in thought.encrypted_content
        assert response.usage.output_tokens_details.reasoning_tokens == 4
        # As clients that store nothing keep them.
        sealed = {
            "type": "reasoning",
            "id": thought.id,
            "summary": [],
            "encrypted_content": thought.encrypted_content,
        }
        items += [sealed, message.to_dict(), {"role": "user", "content": "And?"}]
    prompts = [chat_tokenizer.decode(request.prompt_token_ids) for request in gateway.engine.requests]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier + "I see. So\n</think>\n\nIt is 4")
    current = {"model": MODEL, "input": items, "reasoning": {"context": "current_turn"}}
    assert (await gateway.post(PATH, current)).status_code == 200
    assert "I see" not in chat_tokenizer.decode(gateway.engine.requests[-1].prompt_token_ids)


async def test_a_stream_of_thought_ends_with_the_whole_response(
    start_gateway: Any, ids: dict[str, int]
) -> None:
    gateway = await start_gateway(FakeScript(answers=(BEGUN,), token_ids=ids))
    for fields in ({}, SEALED, {"max_output_tokens": 3}):
        body = {"model": MODEL, "input": "hello", "reasoning": {"effort": "low"}, **fields}
        whole = checked_response((await gateway.post(PATH, body)).content)
        events = checked_events((await gateway.post(PATH, {**body, "stream": True})).content)
        last = events[-1]["response"]
        assert replayed(events) == last["output"] and last["usage"] == whole["usage"]
        assert ("encrypted_content" in last["output"][0]) == ("include" in fields)
        texts = [[item["content"][0]["text"] for item in each["output"]] for each in (whole, last)]
        assert texts[0] == texts[1] and texts[0][0].startswith("I see")
        assert last["status"] == ("incomplete" if "max_output_tokens" in fields else "completed")


@pytest.mark.parametrize("effort", ["none", None])
async def test_without_thought_there_is_no_item(
    start_gateway: Any, ids: dict[str, int], effort: str | None
) -> None:
    gateway = await start_gateway(FakeScript(answers=(("It is", " 4"),), token_ids=ids))
    reasoning = None if effort is None else {"effort": effort}
    answer = await gateway.post(PATH, {"model": MODEL, "input": "hello", "reasoning": reasoning})
    document = checked_response(answer.content)
    assert [item["type"] for item in document["output"]] == ["message"]
    assert document["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert document["reasoning"] == {"effort": effort, "summary": None}


@pytest.mark.parametrize("effort", EFFORTS)
async def test_every_effort_is_repeated(start_gateway: Any, ids: dict[str, int], effort: str) -> None:
    """Also those that Open Responses does not have."""
    gateway = await start_gateway(FakeScript(answers=(BEGUN,), token_ids=ids))
    body = {"model": MODEL, "input": "hello", "reasoning": {"effort": effort, "summary": "auto"}}
    document = checked_response((await gateway.post(PATH, body)).content)
    assert document["reasoning"] == {"effort": effort, "summary": "auto"}


async def test_a_count_is_that_of_the_prompt_with_the_defaults_of_the_version(
    start_gateway: Any, ids: dict[str, int]
) -> None:
    """In both dialects. Thought that is switched off adds its empty markers to the prompt."""
    gateway = await start_gateway(FakeScript(answers=(BEGUN,), token_ids=ids))
    await gateway.adapter("acme", "silent", "a" * 64, AdapterProfile(defaults={"reasoning_effort": "none"}))
    bodies: list[tuple[str, dict[str, Any]]] = [
        (f"{PATH}/input_tokens", {"input": "hello"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ]
    await gateway.post(PATH, {"model": "silent", "input": "hello"})
    used = len(gateway.engine.requests[-1].prompt_token_ids)
    for path, body in bodies:
        plain = (await gateway.post(path, {"model": MODEL, **body})).json()["input_tokens"]
        assert (await gateway.post(path, {"model": "silent", **body})).json()["input_tokens"] == used
        assert plain < used or "messages" in path


async def test_an_effort_without_effect_is_named_as_the_client_does(start_gateway: Any) -> None:
    gateway = await start_gateway()
    await gateway.adapter("acme", "plain", "a" * 64, AdapterProfile(reasoning_style="none"))
    answer = await gateway.post(PATH, {"model": "plain", "input": "hello", "reasoning": {"effort": "low"}})
    assert answer.headers["x-loraplex-ignored-parameters"] == "reasoning.effort"
