"""`/v1/messages` over HTTP: what the engine is asked for, what comes back, whole and streamed."""

import json
from functools import partial
from typing import Any

import pytest
from tests.platform.web.anthropic.wire import (
    HELLO,
    MODEL,
    WEATHER,
    added_up,
    body,
    events_of,
    message_of,
    without_ids,
)
from tests.platform.web.gateway import SECRET

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.spec import decode_spec
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.server.secret import derive
from loraplex.platform.web.transport import sse
from loraplex.tenants.accounts.tenants import TenantRepository

PATH = "/v1/messages"
CALLS = (
    *("I ", "ask.", "\n<to", "ol_call>", '{"na', 'me": "get_wea', 'ther", "argu', 'ments": {"ci', 'ty": "Ro'),
    *('me"}', "}</tool", '_call>\n<tool_call>{"name": "get_weather", "arguments": {"city": "Osl', 'ø"}}'),
    "</tool_call>",
)


async def prompt_of(gateway: Any, **fields: Any) -> str:
    """The text of the prompt that a body becomes."""
    response = await gateway.post(PATH, body(**fields))
    assert response.status_code == 200, response.text
    ids = list(gateway.engine.requests[-1].prompt_token_ids)
    answer = await gateway.post("/v1/detokenize", {"model": MODEL, "tokens": ids})
    text: str = answer.json()["prompt"]
    return text


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
@pytest.mark.parametrize("query", ["", "?beta=true"])
async def test_a_stream_adds_up_to_the_whole_message(
    start_gateway: Any, tokens_per_delta: int, query: str
) -> None:
    gateway = await start_gateway(FakeScript(answers=(CALLS,), tokens_per_delta=tokens_per_delta))
    response = await gateway.post(PATH + query, body(tools=[WEATHER]))
    whole = message_of(response.content)
    stream = await gateway.post(PATH + query, body(tools=[WEATHER], stream=True))
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = events_of(stream.text)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[-1] == {"type": "message_stop"}
    assert added_up(events) == without_ids(whole)
    assert whole["id"].startswith("msg_") and whole["stop_reason"] == "tool_use"
    text, first, second = whole["content"]
    assert (
        text["text"].startswith("I ask.")
        and first["input"] == {"city": "Rome"}
        and second["input"] == {"city": "Oslø"}
    )
    assert first["id"] != second["id"] and first["id"].replace("-", "").replace("_", "").isalnum()


async def test_parameters_reach_the_engine(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("one END",),)))
    sampling = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "stop_sequences": ["END"], "max_tokens": 9}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    await gateway.post(PATH, body(**sampling))
    [request] = gateway.engine.requests
    sampled = request.sampling
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.max_tokens) == (0.5, 0.25, 7, 9)
    assert sampled.stop == ("END",) and request.grammar is None
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    response = await gateway.post(PATH, body(output_config=wanted))
    assert response.headers["x-loraplex-schema-enforcement"] == "full"
    assert decode_spec(gateway.engine.requests[-1].grammar) is not None


async def test_usage_has_what_was_cached(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("a", "b"),), cached_tokens=4))
    marked = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    plain = message_of((await gateway.post(PATH, body())).content)["usage"]
    cached = message_of((await gateway.post(PATH, body(system=marked))).content)["usage"]
    first, second = (len(request.prompt_token_ids) for request in gateway.engine.requests)
    assert (plain["input_tokens"], plain["cache_read_input_tokens"]) == (first - 4, 4)
    assert plain["cache_creation_input_tokens"] == cached["input_tokens"] == 0
    assert cached["cache_creation_input_tokens"] == second - 4 and cached["output_tokens"] == 2


async def test_a_stop_sequence_is_named(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("one ", "END", " two"),)))
    message = message_of((await gateway.post(PATH, body(stop_sequences=["END"]))).content)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_forms_of_one_conversation_have_one_prompt(start_gateway: Any) -> None:
    """Claude Code sends one message first as blocks, then as a string."""
    gateway = await start_gateway()
    parts = [
        {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "lo"},
    ]
    for messages in (HELLO, [{"role": "user", "content": parts}]):
        for system in ("Be kind.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]):
            await gateway.post(PATH, body(messages=messages, system=system))
    chat = [{"role": "system", "content": "Be kind."}, *HELLO]
    await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": chat, "reasoning_effort": "none"})
    assert len({tuple(request.prompt_token_ids) for request in gateway.engine.requests}) == 1


async def test_turns_become_messages_of_the_template(start_gateway: Any) -> None:
    gateway = await start_gateway()
    conversation = [
        {"role": "user", "content": "Weather?"},
        {"role": "system", "content": "It is noon."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Röme"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no "}, {"type": "text", "text": "city"}],
                },
            ],
        },
        {"role": "user", "content": "Again."},
    ]
    prompt = await prompt_of(gateway, messages=conversation, system="Be kind.", tools=[WEATHER])
    parts = [part.split("\n", 1) for part in prompt.split("<|im_start|>")[1:]]
    assert [role for role, _ in parts] == [
        *("system", "user", "system", "assistant", "user", "user", "assistant")
    ]
    texts = [text.removesuffix("<|im_end|>\n") for _, text in parts]
    assert texts[1:3] == ["Weather?", "It is noon."]
    assert texts[3].startswith("I ask.\n") and '{"city": "Röme"}' in texts[3]
    assert "Error: no city" in texts[4] and texts[5] == "Well?\n\nAgain."


async def test_text_of_the_assistant_at_the_end_is_continued(start_gateway: Any) -> None:
    gateway = await start_gateway()
    answer = {"role": "assistant", "content": [{"type": "text", "text": "The answer is ("}]}
    prompt = await prompt_of(gateway, messages=[*HELLO, answer])
    assert prompt.endswith("<|im_start|>assistant\nThe answer is (")


async def test_a_thought_is_what_its_signature_seals(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with gateway.database.as_operator() as session:
        tenant = (await TenantRepository(session).get("acme")).id
    seal = ThoughtSeal(partial(derive, SECRET), tenant)
    sealed = seal.seal(MODEL, "mine")
    altered = sealed[:50] + ("A" if sealed[50] != "A" else "B") + sealed[51:]
    for block, status in (
        ({"type": "thinking", "thinking": "other", "signature": sealed}, 200),
        ({"type": "thinking", "thinking": "plain", "signature": ""}, 200),
        ({"type": "thinking", "thinking": "mine", "signature": seal.seal("other", "mine")}, 400),
        ({"type": "thinking", "thinking": "mine", "signature": altered}, 400),
        ({"type": "thinking", "thinking": "mine", "signature": "EuYB"}, 400),
    ):
        content = [block, {"type": "text", "text": "Hi."}]
        answer = {"role": "assistant", "content": content}
        response = await gateway.post(PATH, body(messages=[*HELLO, answer, *HELLO]))
        assert response.status_code == status, response.text
        if status == 400:
            assert "`messages[1].content[0].signature` was not sealed" in response.json()["error"]["message"]


async def test_deferred_tools_are_offered_like_others(start_gateway: Any) -> None:
    gateway = await start_gateway()
    plain = await prompt_of(gateway, tools=[WEATHER])
    deferred = [{**WEATHER, "defer_loading": True}]
    assert '"city"' in plain and await prompt_of(gateway, tools=deferred) == plain
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [found]}]},
    ]
    assert "get_weather" in await prompt_of(gateway, messages=messages)


async def test_content_may_be_empty_where_the_types_allow_it(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("",),)))
    whole = message_of((await gateway.post(PATH, body())).content)
    assert whole["content"] == []
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": whole["content"]},
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": []}]},
    ]
    prompt = await prompt_of(gateway, messages=messages, system=[])
    assert "<|im_start|>assistant\n<|im_end|>" in prompt and "system" not in prompt


async def test_tools_of_a_host_are_left_out_aloud(start_gateway: Any) -> None:
    gateway = await start_gateway()
    tools = [
        WEATHER,
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    refused = await gateway.post(PATH, body(tools=tools))
    assert refused.status_code == 400
    assert "`tools[1]` is a tool of type 'web_search_20250305'" in refused.json()["error"]["message"]
    header = {"x-loraplex-unsupported-tools": "ignore"}
    served = await gateway.post(PATH, body(tools=tools), **header)
    assert served.status_code == 200 and served.headers["x-loraplex-ignored"] == "tools[1], tools[2]"
    wrong = await gateway.post(PATH, body(tools=tools), **{"x-loraplex-unsupported-tools": "yes"})
    assert wrong.status_code == 400 and "must be absent or `ignore`" in wrong.json()["error"]["message"]
    without = await gateway.post(PATH, body(), **header)
    assert "x-loraplex-ignored" not in without.headers
    paths = (await gateway.get("/openapi.json", [])).json()["paths"]
    for path in (PATH, f"{PATH}/count_tokens", "/v1/responses", "/v1/responses/input_tokens"):
        assert {*header} <= {each["name"] for each in paths[path]["post"]["parameters"]}


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "tool", "name": "get_weather"}, "required", False),
    ],
)
async def test_tool_choice(start_gateway: Any, choice: Any, mode: str, parallel: bool) -> None:
    gateway = await start_gateway(FakeScript(answers=(CALLS,)))
    await gateway.post(PATH, body(tools=[WEATHER], tool_choice=choice))
    await gateway.post(
        "/v1/chat/completions",
        {
            "model": MODEL,
            "max_tokens": 100,
            "messages": HELLO,
            "reasoning_effort": "none",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "get_weather", "parameters": WEATHER["input_schema"]},
                }
            ],
            "tool_choice": mode,
            "parallel_tool_calls": parallel,
        },
    )
    messages, chat = gateway.engine.requests
    assert decode_spec(messages.grammar) == decode_spec(chat.grammar)


async def test_silence_is_broken_by_pings(start_gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    gateway = await start_gateway(FakeScript(answers=(("a", "b"),), token_interval_s=0.3))
    events = events_of((await gateway.post(PATH, body(stream=True))).text)
    assert sum(event["type"] == "ping" for event in events) > 2


async def test_headers_of_every_response(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for fields in ({}, {"stream": True}, {"max_tokens": 0}):
        version = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-1,b-2", "x-request-id": "mine-1"}
        response = await gateway.post(PATH, body(**fields), **version)
        assert response.headers["anthropic-version"] == "2023-06-01"
        assert response.headers["request-id"] == response.headers["x-request-id"] == "mine-1"
    assert "anthropic-version" not in (await gateway.post(PATH, body())).headers
    for other in ("v" * 65, "a\tb", ""):
        served = await gateway.post(PATH, body(), **{"anthropic-version": other})
        assert served.status_code == 200 and served.headers["anthropic-version"] == other


async def test_tokens_are_counted_as_the_prompt_has_them(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for fields in (
        {},
        {"system": "Be kind.", "tools": [WEATHER]},
        {"tool_choice": {"type": "none"}, "tools": [WEATHER]},
    ):
        given = {name: value for name, value in body(**fields).items() if name != "max_tokens"}
        counted = await gateway.post(f"{PATH}/count_tokens?beta=true", given)
        await gateway.post(PATH, body(**fields))
        assert counted.json() == {"input_tokens": len(gateway.engine.requests[-1].prompt_token_ids)}
        assert "request-id" in counted.headers
    refused = await gateway.post(f"{PATH}/count_tokens", body())
    assert refused.status_code == 400 and "max_tokens: Extra inputs" in json.dumps(refused.json())
