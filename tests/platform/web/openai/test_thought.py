"""Thought in chat: how it is asked for, held, told apart from the answer, and counted."""

import json
from typing import Any

import pytest
from tests.platform.conftest import build_tokenizer

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.spec import decode_spec
from loraplex.tenants.registry.records import AdapterProfile

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
THOUGHT = ("<think>", "\n", "I see", ". So", "\n", "</think>", "\n\n", "It is", " 4")
BEGUN = THOUGHT[1:]


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return build_tokenizer(THINKING)


@pytest.fixture(scope="session")
def ids(chat_tokenizer: Any) -> dict[str, int]:
    """The one token of each text of the scripts; of a text that has none, a token with as many bytes of its own."""
    vocabulary = chat_tokenizer.get_vocab()
    one = {
        text: chat_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in THOUGHT
    }
    return {text: found[0] if len(found) == 1 else vocabulary["x"] for text, found in one.items()}


async def answers(gateway: Any, **fields: Any) -> tuple[Any, Any]:
    """The same message whole and streamed, and the request that the engine got."""
    body = {"model": MODEL, "messages": USER, **fields}
    whole = await gateway.client().chat.completions.create(**body)
    async with gateway.client().chat.completions.stream(
        **body, stream_options={"include_usage": True}
    ) as stream:
        streamed = await stream.get_final_completion()
    for choice in (whole.choices[0], streamed.choices[0]):
        message = choice.message
        assert getattr(message, "reasoning", None) == getattr(message, "reasoning_content", None)
    assert whole.choices[0].message.content == streamed.choices[0].message.content
    assert getattr(whole.choices[0].message, "reasoning", None) == getattr(
        streamed.choices[0].message, "reasoning", None
    )
    assert whole.usage == streamed.usage
    return whole, gateway.engine.requests[-1]


def tail(chat_tokenizer: Any, request: Any) -> str:
    return str(chat_tokenizer.decode(request.prompt_token_ids)).partition("assistant\n")[2]


async def test_thought_is_told_apart_where_nothing_asks_for_it(
    start_gateway: Any, chat_tokenizer: Any, ids: dict[str, int]
) -> None:
    gateway = await start_gateway(FakeScript(answers=(THOUGHT,), token_ids=ids))
    whole, request = await answers(gateway)
    message = whole.choices[0].message
    assert (message.reasoning, message.content) == ("I see. So", "It is 4")
    assert request.grammar is None and tail(chat_tokenizer, request) == ""


async def test_a_budget_begins_the_thought_and_bounds_it(
    start_gateway: Any, chat_tokenizer: Any, ids: dict[str, int]
) -> None:
    gateway = await start_gateway(FakeScript(answers=(BEGUN,), token_ids=ids))
    whole, request = await answers(gateway, extra_body={"thinking_token_budget": 64})
    message = whole.choices[0].message
    assert (message.reasoning, message.content) == ("I see. So", "It is 4")
    assert tail(chat_tokenizer, request) == "<think>\n"
    thought = decode_spec(request.grammar).thought
    assert (
        thought is not None
        and thought.begun
        and thought.most == 64
        and decode_spec(request.grammar).source == ""
    )
    assert whole.usage.completion_tokens_details.reasoning_tokens == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"extra_body": {"thinking_token_budget": 0}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
async def test_no_thought(start_gateway: Any, chat_tokenizer: Any, fields: dict[str, Any]) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi", "</think>"),)))
    whole, request = await answers(gateway, **fields)
    message = whole.choices[0].message
    assert message.content == "Hi</think>" and not hasattr(message, "reasoning") and request.grammar is None
    assert tail(chat_tokenizer, request) == "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"reasoning_effort": "low", "max_tokens": 3000}, 1024),
        ({"reasoning_effort": "low", "max_tokens": 100}, 80),
        ({"reasoning_effort": "max", "max_tokens": 100}, None),
        ({"reasoning_effort": "low", "max_tokens": 100, "extra_body": {"thinking_token_budget": 100}}, 100),
    ],
)
async def test_one_table_of_efforts_and_budgets(
    start_gateway: Any, fields: dict[str, Any], most: int | None
) -> None:
    gateway = await start_gateway(FakeScript(answers=(BEGUN,)))
    _, request = await answers(gateway, **fields)
    thought = request.grammar and decode_spec(request.grammar).thought
    assert (thought.most if thought else None) == most


async def test_a_schema_holds_behind_the_thought(start_gateway: Any, ids: dict[str, int]) -> None:
    gateway = await start_gateway(
        FakeScript(answers=((*THOUGHT[:6], "\n\n", '{"n": ', "4}"),), token_ids=ids)
    )
    whole, request = await answers(gateway, response_format=FORMAT)
    assert json.loads(whole.choices[0].message.content) == {"n": 4}
    assert whole.choices[0].message.reasoning == "I see. So"
    spec = decode_spec(request.grammar)
    assert spec.source and spec.thought is not None and not spec.thought.begun and spec.thought.most is None


async def test_thought_of_an_earlier_turn_is_read_by_either_name(
    start_gateway: Any, chat_tokenizer: Any
) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    for name in ("reasoning", "reasoning_content"):
        messages = [*USER, {"role": "assistant", "content": "4", name: "I see"}, *USER]
        assert (await gateway.post(CHAT, {"model": MODEL, "messages": messages})).status_code == 200
    first, second = (request.prompt_token_ids for request in gateway.engine.requests)
    assert first == second and "<think>\nI see\n</think>\n\n4" in chat_tokenizer.decode(first)


async def test_a_profile_has_a_style_and_a_budget_of_its_own(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("hm", "[/T]", "Hi"),)))
    styles: list[Any] = ["none", {"start": "[T]", "end": "[/T]"}]
    for name, style in zip(("plain", "own"), styles, strict=True):
        profile = AdapterProfile(
            reasoning_style=style, defaults={} if style == "none" else {"thinking_token_budget": 7}
        )
        await gateway.adapter("acme", name, ("a" if name == "own" else "b") * 64, profile)
    plain, request = await answers(gateway, model="plain")
    assert plain.choices[0].message.content == "hm[/T]Hi" and request.grammar is None
    own, request = await answers(gateway, model="own")
    assert (own.choices[0].message.reasoning, own.choices[0].message.content) == ("hm", "Hi")
    thought = decode_spec(request.grammar).thought
    assert thought is not None and thought.most == 7 and tail(chat_tokenizer, request) == "[T]"


async def test_a_long_marker_at_the_end_of_the_prompt_is_known(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("hm", "</q>", "Hi"),)))
    marker = "<" + "q" * 62 + ">"
    profile = AdapterProfile(reasoning_style={"start": marker, "end": "</q>"})
    await gateway.adapter("acme", "own", "a" * 64, profile)
    await answers(gateway, model="own", extra_body={"thinking_token_budget": 7})
    thought = decode_spec(gateway.engine.requests[-1].grammar).thought
    assert thought is not None and thought.begun


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 11, "max_tokens": 10}, "thinking_token_budget"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            "reasoning_effort",
        ),
        ({"thinking_token_budget": 4, "continue_final_message": True}, "thinking_token_budget"),
    ],
)
async def test_contradictions(start_gateway: Any, fields: dict[str, Any], param: str) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    messages = [*USER, {"role": "assistant", "content": "I"}]
    response = await gateway.post(CHAT, {"model": MODEL, "messages": messages, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


async def test_markers_in_a_user_message_are_plain_text(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(THOUGHT,)))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a</think>b<think>"}]}
    message = (await gateway.post(CHAT, body)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("I see. So", "It is 4")
    own = chat_tokenizer.convert_tokens_to_ids("</think>")
    assert own not in gateway.engine.requests[0].prompt_token_ids


async def test_the_limit_ends_an_output_inside_the_thought(start_gateway: Any, ids: dict[str, int]) -> None:
    gateway = await start_gateway(FakeScript(answers=(THOUGHT,), token_ids=ids))
    body = {"model": MODEL, "messages": USER, "max_tokens": 3}
    [choice] = (await gateway.post(CHAT, body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I see", "")
    streamed = (await gateway.post(CHAT, {**body, "stream": True})).text
    assert (
        '"reasoning":"I see","reasoning_content":"I see"' in streamed
        and '"finish_reason":"length"' in streamed
    )


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, "[T]"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n[T][/T]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        ({"continue_final_message": True, "messages": [*USER, {"role": "assistant", "content": "I"}]}, "I"),
    ],
)
async def test_a_profile_gives_way_to_what_the_request_says_of_thought(
    start_gateway: Any, chat_tokenizer: Any, fields: dict[str, Any], begins: str
) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    style = {"start": "[T]", "end": "[/T]"}
    profile = AdapterProfile(defaults={"thinking_token_budget": 7}, reasoning_style=style)
    await gateway.adapter("acme", "own", "a" * 64, profile)
    response = await gateway.post(CHAT, {"model": "own", "messages": USER, **fields})
    assert response.status_code == 200, response.text
    [request] = gateway.engine.requests
    assert tail(chat_tokenizer, request) == begins and (request.grammar is not None) == (begins == "[T]")


async def test_a_budget_of_a_profile_without_a_style_has_no_effect(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    profile = AdapterProfile(defaults={"thinking_token_budget": 7}, reasoning_style="none")
    await gateway.adapter("acme", "plain", "a" * 64, profile)
    assert (await gateway.post(CHAT, {"model": "plain", "messages": USER})).status_code == 200


async def test_markers_of_many_tokens_are_found_at_the_end_of_the_prompt(start_gateway: Any) -> None:
    start, end = "{" + "0123456789" * 4 + "}", "[" + "0123456789" * 4 + "]"
    gateway = await start_gateway(FakeScript(answers=(("hm", end, "Hi"),)))
    profile = AdapterProfile(reasoning_style={"start": start, "end": end})
    await gateway.adapter("acme", "long", "a" * 64, profile)
    body = {"model": "long", "messages": USER, "thinking_token_budget": 9}
    message = (await gateway.post(CHAT, body)).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi")
