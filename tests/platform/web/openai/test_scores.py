"""`echo`, `prompt_logprobs` and the probabilities of choices, in the shapes that OpenAI's legacy API and vLLM have."""

import json
import math
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.engine.messages import ScoreRequest
from loraplex.platform.inference.dependencies import ServingConfig

MODEL = "demo/base"
ANSWERS = FakeScript(answers=(("yes",),))
CHOICES = {"structured_outputs": {"choice": ["yes", "no", "maybe"], "probabilities": True}}


async def test_echo_begins_each_choice_with_its_prompt(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    answer = await gateway.client().completions.create(
        model=MODEL, prompt=["hello there", "bye"], echo=True, n=2, logprobs=2, max_tokens=3
    )
    assert [choice.text for choice in answer.choices] == ["hello thereyes"] * 2 + ["byeyes"] * 2
    tokens = [len(request.prompt_token_ids) for request in gateway.engine.requests]
    for choice in answer.choices:
        found = choice.logprobs
        count = tokens[choice.index // 2]
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == count + 1
        assert found.token_logprobs == [None, *[-0.5] * count] and found.top_logprobs[0] is None
        assert all(1 <= len(top) <= 3 for top in found.top_logprobs[1:])
        lengths = [len(token) for token in found.tokens]
        assert found.text_offset == [sum(lengths[:index]) for index in range(count + 1)]
    assert [request.scores for request in gateway.engine.requests] == [ScoreRequest(prompt_logprobs=2)] * 2
    assert answer.usage.prompt_tokens == sum(tokens) and answer.usage.completion_tokens == 4


async def test_max_tokens_zero_returns_the_prompt_alone(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    create = gateway.client().completions.create
    scored = await create(model=MODEL, prompt=[[5, 6, 7], [8]], echo=True, logprobs=0, max_tokens=0)
    plain = await create(model=MODEL, prompt="hello", echo=True, max_tokens=0)
    assert [len(choice.logprobs.tokens) for choice in scored.choices] == [3, 1]
    assert scored.choices[0].text == "".join(scored.choices[0].logprobs.tokens)
    assert {choice.finish_reason for choice in scored.choices} == {"length"}
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("hello", None)
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (4, 0)
    assert gateway.admissions.settled[-1][1].completion_tokens == 0


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_a_streamed_echo_is_the_whole_one(
    start_gateway: Any, logprobs: int | None, max_tokens: int
) -> None:
    gateway = await start_gateway(ANSWERS)
    body: dict[str, Any] = {"model": MODEL, "prompt": ["hello there", "bye"], "echo": True, "seed": 1}
    body |= {"max_tokens": max_tokens} | ({} if logprobs is None else {"logprobs": logprobs})
    whole = await gateway.client().completions.create(**body)
    chunks = [chunk async for chunk in await gateway.client().completions.create(**body, stream=True)]
    for expected in whole.choices:
        mine = [each for chunk in chunks for each in chunk.choices if each.index == expected.index]
        assert "".join(each.text for each in mine) == expected.text
        assert mine[-1].finish_reason == expected.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(each.logprobs, name) for each in mine if each.logprobs is not None]
            joined = [value for part in parts for value in part]
            assert joined == ([] if logprobs is None else getattr(expected.logprobs, name))


async def test_prompt_logprobs_have_the_shape_of_vllm(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    extra = {"prompt_logprobs": 2}
    client = gateway.client()
    completion = await client.completions.create(model=MODEL, prompt=[5, 6, 7], extra_body=extra)
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_body=extra
    )
    found = completion.choices[0].model_extra["prompt_logprobs"]
    assert found[0] is None and [next(iter(each)) for each in found[1:]] == ["6", "7"]
    assert found[1]["6"] | {"decoded_token": ""} == {"logprob": -0.5, "rank": 1, "decoded_token": ""}
    assert all(2 <= len(each) <= 3 for each in found[1:])
    prompt = gateway.engine.requests[-1].prompt_token_ids
    assert len(chat.model_extra["prompt_logprobs"]) == len(prompt)
    assert (
        "prompt_logprobs"
        not in (await client.completions.create(model=MODEL, prompt="a")).choices[0].model_extra
    )


@pytest.mark.parametrize("chat", [False, True])
async def test_choices_get_their_probabilities(start_gateway: Any, chat: bool) -> None:
    info = replace(DEFAULT_INFO, eos_token_ids=[2, 3])
    gateway = await start_gateway(FakeScript(answers=(("yes",),), info=info))
    client = gateway.client()
    answer: Any = (
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], extra_body=CHOICES
        )
        if chat
        else await client.completions.create(model=MODEL, prompt="hi", extra_body=CHOICES)
    )
    generating, scoring = gateway.engine.requests
    assert (scoring.sampling.max_tokens, scoring.sampling.n, scoring.grammar) == (0, 3, None)
    assert scoring.prompt_token_ids == generating.prompt_token_ids and scoring.scores.ending_ids == [2, 3]
    found = answer.choices[0].model_extra["choice_probabilities"]
    assert [each["text"] for each in found] == ["yes", "no", "maybe"]
    lengths = [len(tokens) for tokens in scoring.scores.continuations]
    expected = [-0.5 * length + math.log(2 * math.exp(-0.5)) for length in lengths]
    assert [each["logprob"] for each in found] == pytest.approx(expected)
    assert sum(each["probability"] for each in found) == pytest.approx(1)
    assert answer.usage.prompt_tokens == len(generating.prompt_token_ids) + sum(lengths)
    assert gateway.admissions.settled[-1][1].prompt_tokens == answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"max_tokens": 0, "echo": True} | CHOICES, "structured_outputs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": True} | CHOICES, "structured_outputs.probabilities"),
        ({"structured_outputs": {"regex": "a", "probabilities": True}}, "structured_outputs"),
        (
            {"structured_outputs": {"choice": [str(n) for n in range(129)], "probabilities": True}},
            "structured_outputs.probabilities",
        ),
        (
            {"structured_outputs": {"choice": [letter * 4000 for letter in "abcde"], "probabilities": True}},
            "structured_outputs.probabilities",
        ),
    ],
)
async def test_refusals_name_the_parameter(start_gateway: Any, extra: dict[str, Any], param: str) -> None:
    gateway = await start_gateway(ANSWERS)
    answer = await gateway.post("/v1/completions", {"model": MODEL, "prompt": "hello", **extra})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert gateway.engine.requests == []


async def test_the_log_probabilities_of_a_prompt_are_bounded(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS)
    with pytest.raises(openai.BadRequestError, match="must be at most 524288"):
        await gateway.client().completions.create(
            model=MODEL, prompt=[[5] * 400] * 64, extra_body={"prompt_logprobs": 20}
        )
    assert json.dumps(gateway.admissions.settled) == "[]"


async def test_a_response_repeats_its_prompts_only_so_often(start_gateway: Any) -> None:
    gateway = await start_gateway(ANSWERS, ServingConfig(max_logprobs=100))
    create = gateway.client().completions.with_raw_response.create
    body: dict[str, Any] = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 1}
    for fields, entries in (
        ({"echo": True}, 10),
        ({"echo": True, "logprobs": 1}, 20),
        ({"extra_body": {"prompt_logprobs": 4}}, 50),
    ):
        assert (await create(**body, **fields, n=100 // entries)).status_code == 200
        with pytest.raises(
            openai.BadRequestError, match=f"`n` x .* is {100 + entries}, but must be at most 100"
        ):
            await create(**body, **fields, n=100 // entries + 1)
