"""Chat completions through the official client: whole and streamed responses, choices, log-probabilities, usage."""

import asyncio
import math
import re
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.dependencies import ServingConfig

MODEL = "demo/base"
USER: Any = [{"role": "user", "content": "hello"}]
BEGINNING = "This model's maximum context length is 4096 tokens. However, you requested "
ANSWERS = FakeScript(answers=(("Hello", " wörld", "!"), ("Other",)), cached_tokens=2)


async def test_a_whole_answer(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    response = await gateway.client().chat.completions.create(model=MODEL, messages=USER)
    assert (
        response.object == "chat.completion"
        and response.model == MODEL
        and response.id.startswith("chatcmpl-")
    )
    assert response.system_fingerprint == gateway.engine.info().system_fingerprint == "fp_fa4efa4efa4efa4e"
    assert response.choices[0].message.content == "Hello wörld!"
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].finish_reason == "stop" and response.choices[0].logprobs is None
    request = gateway.engine.requests[0]
    assert response.usage.prompt_tokens == len(request.prompt_token_ids)
    assert response.usage.completion_tokens == 3
    assert response.usage.total_tokens == response.usage.prompt_tokens + 3
    assert response.usage.prompt_tokens_details.cached_tokens == 2
    assert request.weight == 2.0 and request.adapter is None and len(request.namespace) == 32


async def test_the_synchronous_client_gets_the_same(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    client = OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0)
    response = await asyncio.to_thread(client.chat.completions.create, model=MODEL, messages=USER)
    assert response.choices[0].message.content == "Hello wörld!"


async def test_a_stream_is_role_text_reason_usage(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    stream = await gateway.client().chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert {chunk.system_fingerprint for chunk in chunks} == {gateway.engine.info().system_fingerprint}
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in middle] == ["Hello", " wörld", "!"]
    assert last.choices[0].finish_reason == "stop" and last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage.completion_tokens == 3
    assert usage.usage.prompt_tokens_details.cached_tokens == 2
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_the_bytes_of_a_stream(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        response = await client.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": USER, "stream": True},
            headers={"authorization": f"Bearer {gateway.key}", "x-request-id": "my-request.1"},
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "my-request.1"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in response.text


async def test_choices_by_index(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    client = gateway.client()
    response = await client.chat.completions.create(model=MODEL, messages=USER, n=3)
    texts = ["Hello wörld!", "Other", "Hello wörld!"]
    assert [choice.message.content for choice in response.choices] == texts
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.usage.completion_tokens == 7
    streamed, reasons = ["", "", ""], [0, 0, 0]
    async for chunk in await client.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason is not None
    assert streamed == texts and reasons == [1, 1, 1]


async def test_logprobs(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    create = gateway.client().chat.completions.create
    response = await create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2)
    entries = response.choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert math.isclose(entry.logprob, -0.5) and len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    streamed: list[Any] = []
    async for chunk in await create(model=MODEL, messages=USER, logprobs=True, top_logprobs=2, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == entries


async def test_parameters_reach_the_sampler(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    await gateway.client().chat.completions.create(
        model=MODEL,
        messages=USER,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        n=2,
        stop=["X", "Y"],
        seed=42,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": -100},
        extra_body={
            "top_k": -1,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "cache_salt": "salt",
        },
    )
    request = gateway.engine.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.n, sampling.seed) == (7, 2, 42)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.1,
        -0.1,
        1.1,
    )
    assert (sampling.stop, sampling.stop_token_ids, sampling.logit_bias) == (("X", "Y"), (7,), {5: -100.0})
    assert sampling.min_tokens == 2 and sampling.ignore_eos and sampling.include_stop_str_in_output
    assert not sampling.skip_special_tokens and sampling.logprobs is None
    assert request.cache_salt == b"salt"


async def test_a_stop_string_ends_the_text(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    response = await gateway.client().chat.completions.create(model=MODEL, messages=USER, stop="rld")
    assert response.choices[0].message.content == "Hello wö"
    assert response.choices[0].finish_reason == "stop"


async def test_what_does_not_fit_is_refused_with_its_size(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    client = gateway.client()
    with pytest.raises(BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[1] * 4000, max_tokens=97)
    error: Any = refused.value.body
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"] == (f"{BEGINNING}4097 tokens (4000 in the prompt, 97 for the completion).")
    # Small ones are counted, of large ones the fewest tokens are known, of larger ones the characters.
    for content, size in (
        ("x y " * 2_000, r"\d+ tokens \(\d+ in the messages, 1 for the completion\)\."),
        ("x y " * 50_000, r"\d+ tokens \(at least \d+ in the messages, 1 for the completion\)\."),
        ("x y " * 500_001, r"2000004 characters in the messages, of which at most 2000000 are read\."),
    ):
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
        error = refused.value.body
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert re.fullmatch(BEGINNING + size, error["message"])
    assert gateway.engine.requests == []


async def test_the_product_of_choices_and_tokens_is_bounded(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS, ServingConfig(max_completion_tokens=100))
    create = gateway.client().completions.create
    assert len((await create(model=MODEL, prompt=["a", "b"], n=5, max_tokens=10)).choices) == 10
    with pytest.raises(BadRequestError, match="at most 100"):
        await create(model=MODEL, prompt=["a", "b"], n=3, max_tokens=17)


async def test_timings_are_recorded_once(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("a", "b", "c"),), token_interval_s=0.01))
    await gateway.client().chat.completions.create(model=MODEL, messages=USER)
    [timings] = gateway.recorder.timings
    assert timings.finish_reason == "stop" and timings.completion_tokens == 3
    assert timings.arrival < timings.first_token < timings.last_token <= timings.finished
    assert len(timings.token_gaps) == 2 and sum(timings.token_gaps) >= 0.015
