"""Completions and tokenize: every form of prompt, several prompts, and the formats of the responses."""

import asyncio
import math
from typing import Any, cast

import httpx
import openai
import pytest

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import TokenLogprob
from loraplex.platform.web.openai.logprobs import LOWEST, CompletionLogprobs

MODEL = "demo/base"
ANSWERS = FakeScript(answers=(("one", " two"), ("three",)), cached_tokens=1)


async def test_prompts_in_every_form(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    create = gateway.client().completions.create
    hello = chat_tokenizer("hello").input_ids
    for prompt in ("hello", ["hello"], hello, [hello]):
        response = await create(model=MODEL, prompt=prompt)
        assert response.object == "text_completion" and response.choices[0].text == "one two"
        assert gateway.engine.requests[-1].prompt_token_ids == hello


async def test_several_prompts_and_choices_are_indexed_in_order(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    create = gateway.client().completions.create
    response = await create(model=MODEL, prompt=[[1, 2, 3], [4, 5]], n=2)
    texts = ["one two", "three", "one two", "three"]
    assert [choice.text for choice in response.choices] == texts
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (
        5,
        6,
        2,
    )
    streamed, reasons = [""] * 4, [""] * 4
    async for chunk in await create(model=MODEL, prompt=[[1, 2, 3], [4, 5]], n=2, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] += choice.text
        reasons[choice.index] += choice.finish_reason or ""
    assert streamed == texts and reasons == ["stop"] * 4


async def test_logprobs_are_parallel_lists(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    create = gateway.client().completions.create
    whole = (await create(model=MODEL, prompt="hello", logprobs=2)).choices[0].logprobs
    assert whole.token_logprobs == [-0.5, -0.5] and len(whole.tokens) == len(whole.text_offset) == 2
    assert whole.text_offset == [0, len(whole.tokens[0])]
    offsets: list[int] = []
    async for chunk in await create(model=MODEL, prompt="hello", logprobs=2, stream=True):
        offsets += chunk.choices[0].logprobs.text_offset if chunk.choices[0].logprobs else []
    assert offsets == whole.text_offset
    alone = (await create(model=MODEL, prompt="hello", logprobs=0)).choices[0].logprobs
    assert alone.top_logprobs == [{token: -0.5} for token in alone.tokens]


def test_the_sampled_token_is_among_the_best_ones() -> None:
    """As the last of up to `logprobs` + 1 where it is none of them, and by its own number where its text is another's."""
    lists = CompletionLogprobs(cast(Any, lambda token: (f"t{token % 10}", b"")))
    best = [(1, -0.1), (2, -0.2)]
    for token, logprob in ((2, -0.2), (3, -7.0), (4, -math.inf), (11, -8.0)):
        lists.add([TokenLogprob(token, logprob, best)])
    assert lists.take().top_logprobs == [
        {"t1": -0.1, "t2": -0.2},
        {"t1": -0.1, "t2": -0.2, "t3": -7.0},
        {"t1": -0.1, "t2": -0.2, "t4": LOWEST},
        {"t1": -8.0, "t2": -0.2},
    ]


async def test_usage_of_a_stream(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    stream = await gateway.client().completions.create(
        model=MODEL, prompt=["hello", "hello"], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("extra", [{"suffix": "x"}, {"best_of": 2}])
async def test_what_is_not_offered_is_named(start_gateway: Any, extra: dict[str, Any]) -> None:
    gateway = await start_gateway(ANSWERS)
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().completions.create(model=MODEL, prompt="hello", **extra)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", next(iter(extra)))


async def test_one_failing_prompt_ends_the_others(start_gateway: Any) -> None:
    gateway = await start_gateway(
        FakeScript(token_interval_s=0.002, faults=(Fault(kind="nan", after_tokens=3, times=1),))
    )
    with pytest.raises(openai.InternalServerError):
        await gateway.client().completions.create(model=MODEL, prompt=["a", "b", "c"], max_tokens=1000)
    assert gateway.engine.running == 0 and gateway.engine.aborts == 2


async def test_a_leaving_client_ends_all_its_prompts(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(token_interval_s=0.002))
    create = gateway.client().completions.create
    leaving = asyncio.create_task(create(model=MODEL, prompt=["a", "b", "c"], max_tokens=1000))
    while gateway.engine.running < 3:
        await asyncio.sleep(0.002)
    leaving.cancel()
    async with asyncio.timeout(60):
        while not gateway.recorder.timings:
            await asyncio.sleep(0.005)
    assert gateway.engine.running == 0 and gateway.engine.aborts == 3


async def test_tokenize(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    messages = [{"role": "user", "content": "hello"}]
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        text = await client.post("/v1/tokenize", json={"model": MODEL, "prompt": "hello"}, headers=headers)
        chat = await client.post("/v1/tokenize", json={"model": MODEL, "messages": messages}, headers=headers)
    ids = chat_tokenizer("hello").input_ids
    assert text.json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    expected = chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat.json()["tokens"] == expected
    await gateway.client().chat.completions.create(model=MODEL, messages=messages)
    assert gateway.engine.requests[-1].prompt_token_ids == expected
