"""Bad input: each refusal names field and value as the Messages API calls them, and what is allowed."""

from typing import Any

import pytest
from tests.platform.web.anthropic.wire import ERROR, HELLO, WEATHER, body, known

USE = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "warm"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
MARKED = {**TEXT, "cache_control": {"type": "ephemeral"}}
ASSISTANT = {"role": "assistant", "content": "So"}
NOT_ENFORCEABLE = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "`max_tokens` is required: an integer in 1..1000000."),
    "no tokens": ({"max_tokens": 0}, "`max_tokens` is 0, but must be an integer in 1..1000000."),
    "no messages": ({"messages": []}, "`messages` is a list of 0, but must be a list of 1..4096 messages"),
    "image": (
        {"messages": [*HELLO, ASSISTANT, user(TEXT, IMAGE)]},
        "`messages[2].content[1]` is a block of type 'image'; only text, tool_result is supported here.",
    ),
    "document": ({"messages": [user(DOCUMENT)]}, "`messages[0].content[0]` is a block of type 'document'"),
    "image in a result": (
        {"messages": [assistant(USE), user({**RESULT, "content": [TEXT, IMAGE]})]},
        "`messages[1].content[0].content[1]` is a block of type 'image'; only text, tool_reference",
    ),
    "budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 101}},
        "`thinking.budget_tokens` is 101, but must be at most `max_tokens`, 100.",
    ),
    "no budget": ({"thinking": {"type": "enabled"}}, "`thinking` must have `budget_tokens`"),
    "five markers": (
        {"system": [MARKED] * 2, "messages": [user(MARKED, MARKED)], "cache_control": {"type": "ephemeral"}},
        "`cache_control` occurs 5 times, but may occur at most 4 times.",
    ),
    "continued with thinking": (
        {"messages": [*HELLO, ASSISTANT], "thinking": {"type": "adaptive"}},
        "`messages[1]` is text that the model continues, which needs `thinking` to be disabled.",
    ),
    "calls at the end": (
        {"messages": [*HELLO, assistant(USE)]},
        "`messages[1]` is the last message of an assistant, which must be text",
    ),
    "the same id twice": (
        {"messages": [*HELLO, assistant(USE), user(RESULT), assistant(TEXT, USE), user(RESULT)]},
        "`messages[3].content[1].id` is the `id` of an earlier call.",
    ),
    "a result without a call": (
        {"messages": [user(TEXT, RESULT)]},
        "`messages[0].content[1].tool_use_id` is the `id` of no call of an earlier message.",
    ),
    "two results": (
        {"messages": [*HELLO, assistant(USE), user(RESULT, RESULT)]},
        "`messages[2].content[1].tool_use_id` names a call that has a result already.",
    ),
    "129 tools": ({"tools": [WEATHER] * 129}, "`tools` is a list of 129, but must be a list of up to 128"),
    "a name twice": (
        {"tools": [WEATHER, WEATHER]},
        "`tools[1].name` is 'get_weather', the name of an earlier tool.",
    ),
    "a schema that is none": (
        {"tools": [{**WEATHER, "input_schema": []}]},
        "`tools[0].input_schema` is a list of 0, but must be a JSON schema as an object.",
    ),
    "a format that cannot be held": (
        {"output_config": {"format": {"type": "json_schema", "schema": NOT_ENFORCEABLE}}},
        "output_config.format.schema",
    ),
    "a tool that is not offered": (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}},
        "`tool_choice` names 'f', which is not in `tools`.",
    ),
    "unknown": ({"mood": 1}, "mood: Extra inputs are not permitted. Unknown parameter `mood`."),
    "container": ({"container": "c"}, "container: Extra inputs are not permitted."),
    "no result": (
        {"messages": [user({"type": "tool_result", "text": "hi"})]},
        "messages[0].content[0].text: Extra inputs are not permitted.",
    ),
    "an edit": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        '`context_management.edits[0].type` is "clear_tool_uses_20250919", but must be',
    ),
    "temperature": ({"temperature": 2.1}, "`temperature` is 2.1, but must be a number in 0..2."),
    "too long a prompt": (
        {"messages": [{"role": "user", "content": "hello world " * 9000}]},
        "prompt is too long: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refusals(start_gateway: Any, name: str) -> None:
    gateway = await start_gateway()
    fields, message = REFUSED[name]
    response = await gateway.post("/v1/messages", body(**fields))
    assert response.status_code == 400, response.text
    known(ERROR.validate_json(response.content))
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and message in error["message"], error
    assert not gateway.engine.requests


async def test_sizes_have_the_texts_that_claude_code_reads(start_gateway: Any) -> None:
    gateway = await start_gateway()
    counted = await gateway.post("/v1/messages/count_tokens", {"model": "demo/base", "messages": HELLO})
    left = 4096 - counted.json()["input_tokens"]
    response = await gateway.post("/v1/messages", body(max_tokens=32_000))
    assert response.json()["error"]["message"] == (
        f"max_tokens: 32000 > {left}, which is the maximum allowed number of output tokens for demo/base"
    )
    assert (await gateway.post("/v1/messages", body(max_tokens=left))).status_code == 200
    long = [{"role": "user", "content": "hello " * 4096}]
    response = await gateway.post("/v1/messages", body(messages=long, max_tokens=1))
    told = response.json()["error"]["message"]
    assert told.startswith("prompt is too long: ") and told.endswith(" tokens > 4096 maximum")
    assert int(told.split()[4]) > 4096
    longer = [{"role": "user", "content": "hello " * 400_000}]
    response = await gateway.post("/v1/messages", body(messages=longer, max_tokens=1))
    assert response.json()["error"]["message"] == "prompt is too long: 4097 tokens > 4096 maximum"


async def test_what_claude_code_sends_is_served(start_gateway: Any) -> None:
    gateway = await start_gateway()
    sent = body(
        stream=True,
        thinking={"type": "adaptive", "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        system=[TEXT, MARKED, MARKED],
        messages=[user(TEXT, TEXT), {"role": "system", "content": [MARKED]}],
        tools=[
            {
                **WEATHER,
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    **WEATHER["input_schema"],
                },
            },
            {
                "name": "Placeholder",
                "description": "",
                "input_schema": {"type": "object", "properties": {}},
                "defer_loading": True,
            },
        ],
    )
    headers = {"anthropic-version": "2023-06-01", "x-claude-code-session-id": "1", "x-app": "cli"}
    response = await gateway.post("/v1/messages?beta=true", sent, **headers)
    assert response.status_code == 200 and response.text.rstrip().endswith('{"type":"message_stop"}')
