"""Tool calls through the official client: whole and streamed, choices, returned results, and the error of each refusal."""

import json
import threading
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from loraplex.engine.errors import GrammarFailed, GrammarTooSlow
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.grammar.errors import GrammarInvalid, GrammarTooCostly
from loraplex.grammar.spec import decode_spec
from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.prompt_encoding import INLINE_CHARACTERS
from loraplex.platform.parameters.json_object import size_of
from loraplex.platform.parameters.request_object import read_reporting
from loraplex.tenants.registry.records import AdapterProfile

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "How warm is it in Rome and in Oslo?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA, "strict": True},
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
ROME = '{"city": "Rome"}'
OSLO = '{"city": "Oslø"}'
CALLS = (
    *("I ", "ask.", "\n<to", "ol_call>", '{"na', 'me": "get_wea', 'ther", "argu', 'ments": {"ci', 'ty": "Ro'),
    *('me"}', "}</tool", '_call>\n<tool_call>{"name": "get_weather", "arguments": {"city": "Osl', 'ø"}}'),
    "</tool_call>",
)
ONE = ('<tool_call>{"name": "get_weather", ', '"arguments": {"city": ', '"Rome"}}</tool_call>')
SCRIPT = FakeScript(answers=(CALLS,))


class Call(BaseModel):
    """One call put together from the deltas of a stream."""

    id: str
    name: str
    arguments: str = ""


async def accumulated(stream: Any) -> dict[int, tuple[str, list[Call], str | None]]:
    """(content, calls, finish_reason) by choice; a call's id and name come once, before its arguments."""
    choices: dict[int, tuple[str, list[Call], str | None]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            content, calls, reason = choices.get(choice.index, ("", [], None))
            assert reason is None
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    assert call.function.arguments == ""
                    calls.append(Call(id=call.id, name=call.function.name))
                else:
                    assert call.function.name is None and call.type is None and call.function.arguments
                    calls[call.index].arguments += call.function.arguments
            choices[choice.index] = (content + (choice.delta.content or ""), calls, choice.finish_reason)
    return choices


async def test_calls_of_a_whole_answer(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    response = await gateway.client().chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER, TIME]
    )
    [choice] = response.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content.startswith("I ask.")
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", ROME)
    assert second.function.arguments == OSLO and first.id != second.id
    [request] = gateway.engine.requests
    spec = decode_spec(request.grammar)
    assert gateway.compile_checks.checked == [(request.namespace, spec)] and spec.fast_forward
    assert request.sampling.skip_special_tokens
    assert response.usage.prompt_tokens == len(request.prompt_token_ids) > 100


async def test_calls_alone_have_no_content(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    body = {"model": MODEL, "messages": USER, "tools": [WEATHER], "tool_choice": "required"}
    message = (await gateway.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert message["content"] is None and message["refusal"] is None and len(message["tool_calls"]) == 1
    assert set(message["tool_calls"][0]) == {"id", "type", "function"}


async def test_text_alone_has_no_calls(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Warm", " enough."),)))
    body = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    [choice] = (await gateway.post("/v1/chat/completions", body)).json()["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "Warm enough."
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_a_stream_adds_up_to_the_whole_answer(start_gateway: Any, tokens_per_delta: int) -> None:
    gateway = await start_gateway(
        FakeScript(answers=(CALLS, ONE, ("No ", "call")), tokens_per_delta=tokens_per_delta)
    )
    create = gateway.client().chat.completions.create
    whole = await create(model=MODEL, messages=USER, tools=[WEATHER], n=3)
    streamed = await accumulated(await create(model=MODEL, messages=USER, tools=[WEATHER], n=3, stream=True))
    for choice in whole.choices:
        content, calls, reason = streamed[choice.index]
        assert content == (choice.message.content or "") and reason == choice.finish_reason
        wanted = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert [(call.name, call.arguments) for call in calls] == wanted
    assert [len(calls) for _, calls, _ in streamed.values()] == [2, 1, 0]
    assert [reason for *_, reason in streamed.values()] == ["tool_calls", "tool_calls", "stop"]
    ids = {call.id for _, calls, _ in streamed.values() for call in calls}
    assert len(ids) == 3


async def test_the_clients_own_accumulation(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    manager = gateway.client().chat.completions.stream(model=MODEL, messages=USER, tools=[WEATHER])
    arguments = ""
    async with manager as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and event.index == 0:
                arguments += event.arguments_delta
        final = await stream.get_final_completion()
    assert arguments == ROME
    message = final.choices[0].message
    assert [call.function.parsed_arguments for call in message.tool_calls] == [
        {"city": "Rome"},
        {"city": "Oslø"},
    ]
    assert final.choices[0].finish_reason == "tool_calls" and message.content.startswith("I ask.")


async def test_a_stream_begins_with_the_role_and_ends_with_usage(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    create = gateway.client().chat.completions.create
    options = {"include_usage": True}
    chunks = [
        chunk
        async for chunk in await create(
            model=MODEL, messages=USER, tools=[WEATHER], stream=True, stream_options=options, logprobs=True
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content is None
    assert chunks[-1].usage.completion_tokens == 3 and chunks[-2].choices[0].finish_reason == "tool_calls"
    logprobs = [chunk.choices[0].logprobs for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert sum(len(each.content) for each in logprobs) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_cut_off_is_length(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(SCRIPT)
    response = await gateway.client().chat.completions.create(
        model=MODEL, messages=USER, tools=[WEATHER], max_tokens=9, stream=stream
    )
    if stream:
        _, calls, reason = (await accumulated(response))[0]
        arguments = calls[0].arguments
    else:
        reason = response.choices[0].finish_reason
        arguments = response.choices[0].message.tool_calls[0].function.arguments
    assert reason == "length" and ROME.startswith(arguments) and arguments != ROME


async def test_an_answer_and_its_results_go_back_as_they_came(
    start_gateway: Any, chat_tokenizer: Any
) -> None:
    gateway = await start_gateway(SCRIPT)
    create = gateway.client().chat.completions.create
    message = (await create(model=MODEL, messages=USER, tools=[WEATHER])).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{degrees} degrees"}
        for call, degrees in zip(message.tool_calls, (31, 4), strict=True)
    ]
    for echoed in (message, message.model_dump()):
        await create(model=MODEL, messages=[*USER, echoed, *results], tools=[WEATHER])
    *_, second, third = [request.prompt_token_ids for request in gateway.engine.requests]
    assert second == third
    prompt = chat_tokenizer.decode(second, clean_up_tokenization_spaces=False)
    assert f'<tool_call>{{"name": "get_weather", "arguments": {ROME}}}</tool_call>' in prompt
    assert "31 degrees" in prompt and "4 degrees" in prompt


async def test_a_call_that_was_cut_off_may_be_sent_back(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200


async def test_a_result_of_no_call_is_refused(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    result: Any = {"role": "tool", "tool_call_id": "other", "content": "31"}
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().chat.completions.create(model=MODEL, messages=[*USER, result], tools=[WEATHER])
    assert refused.value.param == "messages[1].tool_call_id" and gateway.engine.requests == []


async def test_an_empty_streamed_answer_goes_back_as_it_came(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("",),)))
    manager = gateway.client().chat.completions.stream(model=MODEL, messages=USER, tools=[WEATHER])
    async with manager as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content is None and not message.tool_calls
    messages = [*USER, message.model_dump(), *USER]
    answered = await gateway.client().chat.completions.create(model=MODEL, messages=messages)
    assert answered.choices[0].finish_reason == "stop"


async def test_log_probabilities_add_no_content_to_calls(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    ask: Any = {"model": MODEL, "messages": USER, "tools": [WEATHER], "logprobs": True}
    whole = await gateway.client().chat.completions.create(**ask)
    async with gateway.client().chat.completions.stream(**ask) as stream:
        streamed = await stream.get_final_completion()
    for choice in (*whole.choices, *streamed.choices):
        assert choice.message.content is None and len(choice.logprobs.content) == 3
        assert choice.message.tool_calls[0].function.arguments == ROME


async def test_without_a_choice_to_call_the_text_is_left_alone(
    start_gateway: Any, chat_tokenizer: Any
) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    body = {"model": MODEL, "messages": USER, "tools": [WEATHER], "tool_choice": "none"}
    [choice] = (await gateway.post("/v1/chat/completions", body)).json()["choices"]
    assert choice["message"]["content"] == "".join(ONE) and choice["finish_reason"] == "stop"
    [request] = gateway.engine.requests
    assert request.grammar is None and gateway.compile_checks.checked == []
    assert "get_weather" not in chat_tokenizer.decode(request.prompt_token_ids)


async def test_every_tool_is_shown_whichever_may_be_called(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in ("auto", "required", named, allowed):
        response = await gateway.client().chat.completions.create(
            model=MODEL, messages=USER, tools=[WEATHER, TIME], tool_choice=choice
        )
        assert response.choices[0].finish_reason == "tool_calls"
    prompts = [request.prompt_token_ids for request in gateway.engine.requests]
    assert prompts == [prompts[0]] * 4
    assert len({request.grammar for request in gateway.engine.requests}) >= 3


async def test_fast_forward_is_the_operators(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)), limits=ServingConfig(fast_forward=False))
    await gateway.client().chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER])
    assert not decode_spec(gateway.engine.requests[0].grammar).fast_forward


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (GrammarInvalid("no text satisfies the grammar", param="tools"), 400, "invalid_schema", "tools"),
        (GrammarTooCostly("more than 5 s", param="tools"), 400, "schema_too_costly", "tools"),
        (WorkersUnavailable("256 new grammars wait already"), 503, "overloaded", None),
    ],
)
async def test_what_a_trial_refuses_never_reaches_the_engine(
    start_gateway: Any, error: Exception, status: int, code: str, param: str | None
) -> None:
    gateway = await start_gateway(SCRIPT, refused=error)
    for stream in (False, True):
        body = {"model": MODEL, "messages": USER, "tools": [WEATHER], "stream": stream}
        response = await gateway.post("/v1/chat/completions", body)
        assert response.status_code == status and ("retry-after" in response.headers) == (status == 503)
        body = response.json()["error"]
        assert (body["code"], body["param"], body["message"]) == (code, param, str(error))
    assert gateway.engine.requests == [] and gateway.recorder.timings == []
    assert (await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": USER})).status_code == 200


@pytest.mark.parametrize(
    ("code", "logged"),
    [(GrammarFailed.code, [GrammarFailed.code]), (GrammarTooSlow.code, []), ("nothing_allowed", [])],
)
async def test_a_grammar_that_breaks_down_in_the_engine(
    start_gateway: Any, code: str, logged: list[str]
) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="fail", code=code, message="inner words"),)))
    body = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    with capture_logs() as logs:
        response = await gateway.post("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["code"] == code
    assert "inner words" in response.text
    # Whatever was checked should not fail.
    assert [line["code"] for line in logs if line["event"] == "request failed"] == logged


async def test_a_version_answers_as_its_profile_says(start_gateway: Any, chat_tokenizer: Any) -> None:
    response = ('{"name": "get_weather", ', '"parameters": {"city": "Rome"}}')
    gateway = await start_gateway(FakeScript(answers=(response,)))
    profile = AdapterProfile("llama3", {"temperature": 0.25, "top_k": 7, "max_tokens": 100_000})
    await gateway.adapter("acme", "support", "a" * 64, profile)
    create = gateway.client().chat.completions.create
    answered = await create(
        model="support", messages=USER, tools=[WEATHER], temperature=0.75, tool_choice="required"
    )
    assert answered.choices[0].message.tool_calls[0].function.arguments == ROME
    request = gateway.engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.75, 7)
    left = gateway.engine.info().max_model_len - len(request.prompt_token_ids)
    assert request.sampling.max_tokens == left
    assert '"parameters": {ARGUMENTS}' in chat_tokenizer.decode(request.prompt_token_ids)


async def test_tools_count_when_tokens_are_counted(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    await gateway.client().chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER])
    body = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    response = (await gateway.post("/v1/tokenize", body)).json()
    assert response["tokens"] == gateway.engine.requests[0].prompt_token_ids


async def test_a_large_list_of_tools_counts_towards_the_prompt(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    schema = {"type": "object", "properties": {"city": {"description": "d" * 2_000_000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response = await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": USER, "tools": [tool]})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_large_body_is_checked_and_counted_off_the_event_loop(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[object] = []

    def watched(name: str, function: Any, bound: Any) -> None:
        def watching(*arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                on_loop.append(bound(*arguments))
            return function(*arguments)

        monkeypatch.setattr(name, watching)

    watched("loraplex.platform.web.inference_plane.read_reporting", read_reporting, lambda *_: "checked")
    watched("loraplex.platform.inference.prompt_encoding.size_of", size_of, lambda value, most: most)
    gateway = await start_gateway(FakeScript(answers=(ONE,)))
    values = {"type": "object", "properties": {"a": {"enum": list(range(30_000))}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": values}}
    response = await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": USER, "tools": [tool]})
    assert response.json()["error"]["code"] == "context_length_exceeded" and on_loop == [INLINE_CHARACTERS]


async def test_the_arguments_of_every_call_are_json(start_gateway: Any) -> None:
    gateway = await start_gateway(SCRIPT)
    response = await gateway.client().chat.completions.create(model=MODEL, messages=USER, tools=[WEATHER])
    parsed = [json.loads(call.function.arguments) for call in response.choices[0].message.tool_calls]
    assert parsed == [{"city": "Rome"}, {"city": "Oslø"}]
