"""What clients of other servers send is served as they mean it, or refused by name."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionMessage
from sqlalchemy import text as sql
from tests.platform.web.limited_gateway import limited
from tests.platform.web.openai.streams import CHAT, COMPLETIONS, STREAMS, chunks_of

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.web.openai.response_models import ChatCompletionChunk, Completion
from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits

MODEL = "demo/base"
HELLO: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
A: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WHOLE: Any = {"type": "integer"}
IGNORED = "x-loraplex-ignored-parameters"
UNKNOWN = {"guided_decoding_backend": "x", "a\r\nset-cookie": 1}


@pytest.mark.parametrize("stream", STREAMS)
async def test_every_event_has_the_usage_so_far_and_the_token_ids(start_gateway: Any, stream: str) -> None:
    script, path, body = STREAMS[stream]
    gateway = await start_gateway(replace(script, cached_tokens=1))
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chunks_of(gateway, path, {**body, "stream_options": both, "return_token_ids": True})
    model = ChatCompletionChunk if path == CHAT else Completion
    read: list[Any] = [model.model_validate_json(each, strict=True, extra="forbid") for each in chunks]
    prompts = [each.prompt_token_ids for each in gateway.engine.requests]
    n, ids, told = body.get("n", 1), dict[int, list[int]](), dict[int, list[int]]()
    for chunk in read[:-1]:
        (choice,) = chunk.choices
        told.setdefault(choice.index, []).extend(getattr(choice, "prompt_token_ids", []))
        ids.setdefault(choice.index, []).extend(choice.token_ids)
        usage = chunk.usage
        assert usage.prompt_tokens == len(prompts[choice.index // n])
        # An echo may precede the start of its prompt.
        assert usage.prompt_tokens_details.cached_tokens == 1 or not ids[choice.index]
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        if "token_ids" in choice.model_fields_set:
            assert usage.completion_tokens == len(ids[choice.index])
    if path == CHAT:
        assert [each.prompt_token_ids for each in read if each.prompt_token_ids] == prompts
    else:
        assert told == {index: prompts[index // n] for index in range(n * len(prompts))}
    assert read[-1].choices == []
    assert sum(map(len, ids.values())) == read[-1].usage.completion_tokens
    plain = await chunks_of(gateway, path, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in json.loads(each) for each in plain), "as vLLM reads it without `include_usage`"


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_whole_response_has_the_token_ids(start_gateway: Any, stream: str) -> None:
    script, path, body = STREAMS[stream]
    gateway, fields = (
        await start_gateway(script),
        {name: body[name] for name in body if name != "stream_options"},
    )
    told = (await gateway.post(path, {**fields, "return_token_ids": True})).json()
    prompts, n = [each.prompt_token_ids for each in gateway.engine.requests], fields.get("n", 1)
    assert sum(len(each["token_ids"]) for each in told["choices"]) == told["usage"]["completion_tokens"]
    if path == CHAT:
        assert told["prompt_token_ids"] == prompts[0]
    else:
        assert [each["prompt_token_ids"] for each in told["choices"]] == [
            each for each in prompts for _ in range(n)
        ]
    silent = (await gateway.post(path, fields)).json()
    assert "prompt_token_ids" not in silent and "token_ids" not in silent["choices"][0]


async def test_log_probabilities_name_tokens_by_their_ids(start_gateway: Any) -> None:
    gateway = await start_gateway()
    numbered = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = {**HELLO, **numbered, "logprobs": True, "top_logprobs": 1}
    (choice,) = (await gateway.post(CHAT, body)).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(each["token"].startswith("token_id:") for entry in entries for each in entry["top_logprobs"])
    completion = {"model": MODEL, "prompt": "a", "max_tokens": 3, "logprobs": 1, **numbered}
    (choice,) = (await gateway.post(COMPLETIONS, completion)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


async def test_both_names_of_the_maximum_on_completions(start_gateway: Any) -> None:
    gateway, body = await start_gateway(), {"model": MODEL, "prompt": "a"}
    for given in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        response = await gateway.post(COMPLETIONS, {**body, **given})
        assert response.json()["usage"]["completion_tokens"] == 3
    refused = await gateway.post(COMPLETIONS, {**body, "max_completion_tokens": 3, "max_tokens": 4})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_completion_tokens")


async def test_a_history_of_what_clients_received_changes_no_prompt(start_gateway: Any) -> None:
    gateway, user = await start_gateway(), {"role": "user", "content": "hello"}
    bare = {"role": "assistant", "content": "Hi", "tool_calls": [call(), call("d")]}
    result: Any = {"role": "tool", "tool_call_id": "c", "content": "1"}
    dumped = ChatCompletionMessage.model_validate({**bare, "annotations": []}).model_dump()
    litellm = {
        "provider_specific_fields": {"a": 1},
        "thinking_blocks": [],
        "images": [],
        "reasoning_content": "so",
    }
    called = {**call(), "index": 0, "provider_specific_fields": None, "extra_content": {"google": {}}}
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "hello", **cached}]
    told: list[Any] = [
        [user, dumped, result],
        [
            {**user, "content": parts},
            {**bare, **litellm, "tool_calls": [called, call("d")]},
            {**result, **cached},
        ],
        [{**user, **cached}, {**bare, "reasoning": "so", "refusal": "no", "reasoning_details": [{}]}, result],
        [
            user,
            {**bare, "content": [{"type": "text", "text": "Hi"}, {"type": "refusal", "refusal": "no"}]},
            result,
        ],
    ]
    for messages in [[user, bare, result], *told]:
        response = await gateway.post(CHAT, {**HELLO, "messages": messages})
        assert response.status_code == 200, response.text
    prompts = [each.prompt_token_ids for each in gateway.engine.requests]
    assert prompts == [prompts[0]] * len(prompts)
    tool = {"type": "function", "function": {"name": "f"}}
    for given in ({**tool, **cached}, {**tool, "function": {"name": "f", **cached}}):
        assert (await gateway.post(CHAT, {**HELLO, "tools": [given]})).status_code == 200


def call(call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_template_values_are_those_that_the_template_reads(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for given in (
        {"enable_thinking": False},
        {"chat_template": "{{ 1 }}"},
        {"messages": "a"},
        {"tokenize": True},
    ):
        response = await gateway.post(CHAT, {**HELLO, "chat_template_kwargs": given})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == f"chat_template_kwargs.{next(iter(given))}"
    refused = await gateway.post(
        CHAT, {**HELLO, "continue_final_message": True, "add_generation_prompt": True}
    )
    assert refused.json()["error"]["param"] == "continue_final_message"


async def test_tokens_and_their_text(start_gateway: Any) -> None:
    gateway = await start_gateway()

    async def ids(**given: Any) -> list[int]:
        response = await gateway.post("/v1/tokenize", {"model": MODEL, **given})
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["tokens"]
        return tokens

    async def text(tokens: list[int]) -> Any:
        return await gateway.post("/v1/detokenize", {"model": MODEL, "tokens": tokens})

    open_, whole = (
        await ids(messages=HELLO["messages"], add_generation_prompt=False),
        await ids(messages=HELLO["messages"]),
    )
    assert whole[: len(open_)] == open_ and len(open_) < len(whole)
    continued = [*HELLO["messages"], {"role": "assistant", "content": "Well"}]
    assert (await ids(messages=continued, continue_final_message=True))[: len(whole)] == whole
    assert await ids(prompt="a b", add_special_tokens=False) in (
        await ids(prompt="a b"),
        (await ids(prompt="a b"))[1:],
    )
    assert (await text(await ids(prompt="a <|im_end|> é", add_special_tokens=False))).json() == {
        "prompt": "a <|im_end|> é"
    }
    assert (await text([])).json() == {"prompt": ""}
    refused = await text([DEFAULT_INFO.vocab_size])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    special = await gateway.post(
        "/v1/tokenize", {"model": MODEL, **HELLO, "add_special_tokens": True, "max_tokens": None}
    )
    assert (special.status_code, special.json()["error"]["param"]) == (400, "add_special_tokens")


async def test_more_choices_than_may_run_at_once(
    start_gateway: Any, database: Database, valkey_url: str
) -> None:
    async with limited(start_gateway, database, valkey_url, concurrent_requests=5) as (gateway, _):
        assert (await gateway.post(CHAT, {**HELLO, "n": 5})).status_code == 200
        for path, body in (
            (CHAT, {**HELLO, "n": 6}),
            (COMPLETIONS, {"model": MODEL, "prompt": ["a", "b"], "n": 3}),
        ):
            refused = await gateway.post(path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "n")
            assert (
                "`n` is 6" in error["message"]
                and "at most 5: `concurrent_requests` of the tenant" in error["message"]
            )
        assert (await gateway.post(CHAT, {**HELLO, "n": 1})).status_code == 200
    gateway = await start_gateway(other=database)
    gateway.key = await gateway.tenant("other")
    many = await gateway.post(CHAT, {**HELLO, "n": 128})
    assert (
        len(many.json()["choices"]) == 128
        and (await gateway.post(CHAT, {**HELLO, "n": 129})).status_code == 400
    )


async def test_models_say_when_they_were_created_and_what_they_hold(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.platform.web.inference_plane.time", SimpleNamespace(time=lambda: 12.5))
    gateway = await start_gateway(FakeScript(info=replace(DEFAULT_INFO, num_blocks=100)))
    await gateway.adapter("acme", "pirate", "a" * 64)
    async with gateway.database.as_operator() as session:
        created = await session.scalar(sql("SELECT created_at FROM adapter_versions"))
    headers = [("authorization", f"Bearer {gateway.key}")]
    base, adapter = (await gateway.get("/v1/models", headers)).json()["data"]
    one = (await gateway.get("/v1/models/pirate", headers)).json()
    assert one == adapter and (base["created"], adapter["created"]) == (12, int(created.timestamp()))
    assert (base["max_model_len"], adapter["max_model_len"]) == (1600, 1600)


async def test_formats_as_other_servers_spell_them(start_gateway: Any) -> None:
    script = FakeScript(answers=(('{"a": 1}',),))
    gateway, schema = await start_gateway(script), A
    tag = {"type": "triggered_tags", "triggers": ["<a"], "tags": [tagged(WHOLE)]}
    formats: list[Any] = [
        {"type": "json_object", "schema": schema},
        {"type": "json_object", "value": schema},
        {"type": "structural_tag", "format": tag},
        {"type": "structural_tag", "format": json.dumps(tag)},
    ]
    for wanted in formats:
        response = await gateway.post(CHAT, {**HELLO, "response_format": wanted})
        assert response.status_code == 200, response.text
    by_schema, by_value, *by_tag = [spec for _, spec in gateway.compile_checks.checked]
    assert (
        by_value == by_schema
        and by_tag[0] == by_tag[1]
        and "<a>" in by_tag[0].source
        and by_schema.source != by_tag[0].source
    )
    wrong = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": 1}}}
    refused = await gateway.post(CHAT, {**HELLO, "response_format": wrong})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    older = {"type": "structural_tag", "structures": [], "triggers": ["<a"]}
    refused = await gateway.post(CHAT, {**HELLO, "response_format": older})
    assert refused.json()["error"]["param"] == "response_format.structures"


def tagged(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unknown_parameters_are_refused_or_served_and_named(
    start_gateway: Any, database: Database, valkey_url: str, path: str
) -> None:
    body = (
        {**HELLO, "messages": [{**HELLO["messages"][0], "mood": 1}]}
        if path == CHAT
        else {"model": MODEL, "prompt": "a"}
    )
    named = "guided_decoding_backend, a%0D%0Aset-cookie" + (", mood" if path == CHAT else "")
    reporting = Database(database.url, limits=DefaultLimits(unknown_parameters="report"))
    cached = ServingConfig(key_cache_s=60.0)
    async with limited(start_gateway, reporting, valkey_url, FakeScript(), cached) as (gateway, http):

        async def choose(value: str) -> str:
            async with gateway.database.as_operator() as session:
                await session.execute(sql("UPDATE tenants SET unknown_parameters = :value"), {"value": value})
                (tenant_id,) = await session.scalars(sql("SELECT id FROM tenants WHERE name = 'boss'"))
            await gateway.admissions.publish(tenant_id)
            shown: str = (await http.get("me")).json()["tenant"]["unknown_parameters"]
            return shown

        for own, effect in (("default", "report"), ("refuse", "refuse"), ("report", "report")):
            assert await choose(own) == effect
            response = await gateway.post(path, {**body, **UNKNOWN})
            if effect == "report":
                assert response.status_code == 200 and set(response.headers[IGNORED].split(", ")) == set(
                    named.split(", ")
                )
                streamed = await gateway.post(path, {**body, **UNKNOWN, "stream": True})
                assert streamed.headers[IGNORED] == response.headers[IGNORED]
            else:
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "unknown_parameter")
                assert error["param"] == "guided_decoding_backend" and IGNORED not in response.headers
            assert (
                IGNORED
                not in (
                    await gateway.post(
                        path, {**body, "messages": HELLO["messages"]} if path == CHAT else body
                    )
                ).headers
            )
        known_but_refused = await gateway.post(
            path, {**body, **UNKNOWN, "best_of" if path == COMPLETIONS else "store": True}
        )
        assert known_but_refused.status_code == 400
    await reporting.close()
