"""`/v1/responses` through a gateway: bodies and events, the official client, tool loops, errors, and the counting of tokens."""

import asyncio
import json
import time
from collections.abc import Awaitable
from itertools import pairwise
from typing import Any

import openai
import pytest
from tests.platform.web.openai.responses_events import (
    MODEL,
    PATH,
    checked_events,
    checked_response,
    replayed,
    without_ids,
)

from loraplex.engine.fake_engine import FakeScript, Fault

TEXTS = FakeScript(answers=(("Hello", " wörld\n", '"!"'),))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": SCHEMA,
    "strict": True,
}
NOTE: Any = {"type": "custom", "name": "note", "description": "Keeps a note"}
CRM: Any = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [
        {"type": "function", "name": "find", "parameters": SCHEMA},
        {"type": "custom", "name": "write"},
    ],
}
TOOLS = [WEATHER, NOTE, CRM]


def call(name: str, arguments: Any) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'\n<tool_call>{{"name": "{name}", "arguments": {written}}}</tool_call>'


CALLS = FakeScript(
    answers=(
        (
            "I ask.",
            *call("get_weather", {"city": "Oslø"}),
            *call("note", {"input": 'a "quoted" line\n\N{GRINNING FACE}'}),
            *call("crm__find", {"city": "Rome"}),
            *call("crm__write", {"input": "x"}),
        ),
    )
)
BODIES: dict[str, tuple[FakeScript, dict[str, Any]]] = {
    "text": (TEXTS, {}),
    "everything": (
        TEXTS,
        {
            "instructions": "Be brief.",
            "metadata": {"a": "b"},
            "user": "u",
            "safety_identifier": "s",
            "prompt_cache_key": "k",
            "service_tier": "auto",
            "temperature": 0.5,
            "top_p": 0.25,
            "max_output_tokens": 100,
            "max_tool_calls": 3,
            "parallel_tool_calls": False,
            "truncation": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"summary": "auto"},
            "store": False,
            "background": False,
        },
    ),
    "logprobs": (TEXTS, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "calls": (CALLS, {"tools": TOOLS, "tool_choice": "auto"}),
    "length": (TEXTS, {"max_output_tokens": 2}),
    "schema": (
        FakeScript(answers=(('{"city"', ': "Rome"}'),)),
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
    ),
    "json_object": (FakeScript(answers=(('{"a"', ": 1}"),)), {"text": {"format": {"type": "json_object"}}}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_ends_with_the_whole_response(start_gateway: Any, name: str) -> None:
    script, fields = BODIES[name]
    gateway = await start_gateway(script)
    body = {"model": MODEL, "input": "hello", **fields}
    answer = await gateway.post(PATH, body)
    assert answer.status_code == 200, answer.text
    whole = checked_response(answer.content)
    streamed = await gateway.post(PATH, {**body, "stream": True})
    events = checked_events(streamed.content)
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert replayed(events) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    echoed = {name: each for name, each in fields.items() if name not in ("include", "tools", "store")}
    if name == "everything":
        echoed |= {"service_tier": "default", "reasoning": {"summary": "auto", "effort": None}}
    assert whole.items() >= echoed.items()


async def test_text_and_usage(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=TEXTS.answers, cached_tokens=3))
    response = await gateway.client().responses.create(model=MODEL, input="hello", instructions="Be brief.")
    assert response.output_text == 'Hello wörld\n"!"' and response.status == "completed"
    [request] = gateway.engine.requests
    usage = response.usage
    assert usage.input_tokens == len(request.prompt_token_ids)
    assert (usage.output_tokens, usage.total_tokens) == (3, usage.input_tokens + 3)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0
    chat = await gateway.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    )
    assert chat.usage.prompt_tokens == usage.input_tokens
    assert gateway.engine.requests[1].prompt_token_ids == request.prompt_token_ids


async def test_calls_come_back_as_the_client_knows_the_tools(start_gateway: Any) -> None:
    gateway = await start_gateway(CALLS)
    response = await gateway.client().responses.create(model=MODEL, input="hello", tools=TOOLS)
    text, weather, note, find, write = response.output
    assert (text.type, text.content[0].text.strip()) == ("message", "I ask.")
    assert (weather.type, weather.name, weather.namespace) == ("function_call", "get_weather", None)
    assert json.loads(weather.arguments) == {"city": "Oslø"}
    assert (note.type, note.name) == ("custom_tool_call", "note")
    assert note.input == 'a "quoted" line\n\N{GRINNING FACE}'
    assert (find.type, find.namespace, find.name) == ("function_call", "crm", "find")
    assert (write.type, write.namespace, write.name, write.input) == ("custom_tool_call", "crm", "write", "x")
    assert len({each.call_id for each in (weather, note, find, write)}) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_of_three_turns_by_the_official_client(start_gateway: Any, stream: bool) -> None:
    """The client sends back what it got; the prompt of each turn begins with that of the turn before."""
    gateway = await start_gateway(CALLS)
    create = gateway.client().responses.create
    items: list[Any] = [{"role": "user", "content": "hello"}]
    for turn in range(3):
        fields: Any = {"model": MODEL, "input": items, "tools": TOOLS, "store": False, "user": f"{turn}"}
        if stream:
            async with gateway.client().responses.stream(**fields) as events:
                types = [event.type async for event in events]
                response: Any = await events.get_final_response()
            assert types[0] == "response.created" and types[-1] == "response.completed"
        else:
            response = await create(**fields)
        calls = [each for each in response.output if each.type != "message"]
        assert [each.type for each in calls] == ["function_call", "custom_tool_call"] * 2
        items += [each.to_dict() for each in response.output]
        items += [
            {
                "type": f"{each.type}_output",
                "call_id": each.call_id,
                "output": [{"type": "input_text", "text": "done"}],
            }
            for each in calls
        ]
    prompts = [request.prompt_token_ids for request in gateway.engine.requests]
    text = gateway.app.state.inference.dependencies.prompts.text_of
    for earlier, later in pairwise(prompts):
        # But for the beginning of the answer.
        assert text(later).startswith(text(earlier).rpartition("assistant")[0])
    assert text(prompts[2]).count("crm__find") == 1 + 2 * 2


async def test_what_clients_of_chat_see_is_what_clients_of_responses_see(start_gateway: Any) -> None:
    """One conversation in both dialects has equal prompts, also where items have other forms."""
    gateway = await start_gateway(TEXTS)
    called = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    chat = {
        "model": MODEL,
        "tools": [
            {"type": "function", "function": {name: WEATHER[name] for name in WEATHER if name != "type"}}
        ],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "I ask.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c", "content": "warm"},
            {"role": "user", "content": "And?"},
        ],
    }
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask."}],
            "id": "m",
        },
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "warm", "status": "completed"},
        {"role": "user", "content": "And?"},
    ]
    both: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        (PATH, {"model": MODEL, "tools": [WEATHER], "instructions": "Be brief.", "input": items}),
        (
            PATH,
            {
                "model": MODEL,
                "tools": [WEATHER],
                "input": [{"role": "system", "content": "Be brief."}, *items],
            },
        ),
    ]
    for path, body in both:
        assert (await gateway.post(path, {**body, "seed": 7})).status_code == 200
    first, *others = [(each.prompt_token_ids, each.sampling.seed) for each in gateway.engine.requests]
    assert others == [first] * 2
    counted = await gateway.client().responses.input_tokens.count(
        model=MODEL, tools=[WEATHER], instructions="Be brief.", input=items
    )
    assert counted.input_tokens == len(first[0])


async def test_tools_of_a_host_are_refused_or_left_out_aloud(start_gateway: Any) -> None:
    gateway = await start_gateway(TEXTS)
    tools = [WEATHER, {"type": "web_search"}, NOTE, {"type": "mcp", "server_label": "x"}]
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "mcp"}, {"type": "custom", "name": "note"}],
    }
    body = {"model": MODEL, "input": "hello", "tools": tools, "tool_choice": allowed}
    header = {"x-loraplex-unsupported-tools": "ignore"}
    for path in (PATH, f"{PATH}/input_tokens"):
        error = (await gateway.post(path, body)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_tool", "tools[1]")
        assert (
            "'web_search'" in error["message"] and "x-loraplex-unsupported-tools: ignore" in error["message"]
        )
        served = await gateway.post(path, body, **header)
        assert served.status_code == 200, served.text
        assert served.headers["x-loraplex-ignored"] == "tools[1], tools[3], tool_choice.tools[0]"
    document = checked_response((await gateway.post(PATH, body, **header)).content)
    assert [each["name"] for each in document["tools"]] == ["get_weather", "note"]
    for choice in ({"type": "web_search"}, {**allowed, "tools": [{"type": "mcp"}]}):
        error = (await gateway.post(PATH, {**body, "tool_choice": choice}, **header)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_tool", "tool_choice")
        assert "names only tools that this server does not run" in error["message"]
        assert "x-loraplex" not in error["message"]
    only = {**body, "tools": tools[1:2], "tool_choice": "required"}
    assert (await gateway.post(PATH, only, **header)).status_code == 400
    wrong = await gateway.post(PATH, body, **{"x-loraplex-unsupported-tools": "drop"})
    assert wrong.json()["error"]["param"] == "x-loraplex-unsupported-tools"


async def test_a_response_repeats_what_was_read(start_gateway: Any) -> None:
    """Members that clients add, also of other types than the official ones, come back to nobody."""
    gateway = await start_gateway(TEXTS)
    added: Any = {"defer_loading": "x" * 1000, "allowed_callers": 7, "output_schema": []}
    tools = [{**each, **added} for each in (WEATHER, NOTE)]
    tools.append({**CRM, **added, "tools": [{**each, **added} for each in CRM["tools"]]})
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "crm"}]}
    body = {"model": MODEL, "input": "hello", "tools": tools, "tool_choice": allowed}
    document = checked_response((await gateway.post(PATH, body)).content)
    assert document["tool_choice"] == allowed
    weather, note, crm = document["tools"]
    assert weather == WEATHER
    assert note == {**NOTE, "format": None} and [each["name"] for each in crm["tools"]] == ["find", "write"]
    assert not any(name in json.dumps(document) for name in added)


async def largest_gap_s(running: Awaitable[Any]) -> tuple[Any, float]:
    """What is awaited, and the longest time that the event loop stood still meanwhile, in seconds."""
    task, largest, last = asyncio.ensure_future(running), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.002)
        now = time.perf_counter()
        largest, last = max(largest, now - last), now
    return task.result(), largest


async def test_a_body_of_10_mib_of_items(start_gateway: Any) -> None:
    gateway = await start_gateway(TEXTS)
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "think " * 190}]}
    calls = [
        {"type": "function_call", "call_id": f"{index}", "name": "f", "arguments": '{"a": "' + "x" * 2300}
        for index in range(4000)
    ]
    word = {"role": "user", "content": "word " * 1000}
    for items in ([thought] * 8100, calls, [word] * 2000, [{**word, "role": "developer"}] * 2000):
        body = json.dumps({"model": MODEL, "input": [word, *items]}).encode()
        assert len(body) > 9_000_000
        refused, gap = await largest_gap_s(gateway.post(PATH, body))
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded" and "4096 tokens" in error["message"]
        assert gap < 1.0
    larger = await gateway.post(PATH, {"model": MODEL, "input": [word] * 2200})
    assert larger.status_code == 413


async def test_the_oldest_turns_are_left_out(start_gateway: Any) -> None:
    gateway = await start_gateway(TEXTS)
    turns: list[Any] = []
    for turn in range(30):
        turns += [
            {"role": "user", "content": f"question {turn} " + "word " * 50},
            {"type": "function_call", "call_id": f"c{turn}", "name": "get_weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{turn}", "output": "word " * 50},
            {"role": "assistant", "content": f"answer {turn}"},
        ]
    body: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": turns,
        "max_output_tokens": 1000,
    }
    refused = await gateway.post(PATH, body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    served = await gateway.post(PATH, {**body, "truncation": "auto"})
    dropped = int(served.headers["x-loraplex-truncated-items"])
    assert dropped % 4 == 0 and 0 < dropped < len(turns)
    [request] = gateway.engine.requests
    assert len(request.prompt_token_ids) <= 3096
    text = gateway.app.state.inference.dependencies.prompts.text_of(request.prompt_token_ids)
    assert "Be brief." in text and f"question {dropped // 4} " in text
    assert f"question {dropped // 4 - 1} " not in text
    del body["max_output_tokens"]
    counted = await gateway.post(f"{PATH}/input_tokens", {**body, "truncation": "auto"})
    # A quarter of the context is left to an answer whose request names no maximum.
    assert 2700 < counted.json()["input_tokens"] <= 3072
    assert dropped <= int(counted.headers["x-loraplex-truncated-items"]) <= dropped + 4
    served = await gateway.post(PATH, {**body, "truncation": "auto"})
    request = gateway.engine.requests[-1]
    assert len(request.prompt_token_ids) == counted.json()["input_tokens"]
    assert request.sampling.max_tokens >= 1024
    unit = (await gateway.post(f"{PATH}/input_tokens", {"model": MODEL, "input": "word " * 100})).json()
    one = [*turns, {"role": "user", "content": "word " * (350_000 // unit["input_tokens"])}]
    assert (await gateway.post(PATH, {**body, "truncation": "auto", "input": one})).status_code == 200
    whole = {**body, "truncation": "auto", "input": turns[-4:]}
    assert "x-loraplex-truncated-items" not in (await gateway.post(PATH, whole)).headers
    hopeless = {**whole, "input": [*turns, {"role": "user", "content": "word " * 5000}]}
    assert (await gateway.post(PATH, hopeless)).json()["error"]["code"] == "context_length_exceeded"


async def test_a_count_may_be_above_the_context(start_gateway: Any) -> None:
    gateway = await start_gateway(TEXTS)
    user = {"role": "user", "content": "word " * 40_000}
    for path, name in ((f"{PATH}/input_tokens", "input"), ("/v1/messages/count_tokens", "messages")):
        counted = await gateway.post(path, {"model": MODEL, name: [user]})
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 40_000


async def test_a_count_of_instructions_alone(start_gateway: Any) -> None:
    """`input` is optional in the official type."""
    gateway = await start_gateway(TEXTS)
    count = gateway.client().responses.input_tokens.count
    alone = await count(model=MODEL, instructions="Be brief.")
    both = await count(model=MODEL, instructions="Be brief.", input="hello")
    assert 0 < alone.input_tokens < both.input_tokens
    error = (await gateway.post(f"{PATH}/input_tokens", {"model": MODEL})).json()["error"]
    assert (error["param"], error["code"]) == ("input", "missing_required_parameter")


async def test_an_engine_that_fails_in_a_stream(start_gateway: Any) -> None:
    fault = Fault(kind="fail", after_tokens=2, code="engine_error")
    gateway = await start_gateway(FakeScript(answers=TEXTS.answers, faults=(fault,)))
    events = checked_events(
        (await gateway.post(PATH, {"model": MODEL, "input": "hello", "stream": True})).content
    )
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    with pytest.raises(openai.APIError):
        async for _ in await gateway.client().responses.create(model=MODEL, input="hello", stream=True):
            pass
    with pytest.raises(openai.InternalServerError):
        await gateway.client().responses.create(model=MODEL, input="hello")
