"""The official `openai` client against the live demo: real engine, databases and HTTP."""

import math
from typing import Any

import pytest
from openai import (
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    OpenAI,
    PermissionDeniedError,
)
from tests.end_to_end.live_server import LiveServer

QUESTION = "Explain in two sentences why the sky is blue."
MODELS = ("base", "pirate", "records", "support")


def ask(client: OpenAI, model: str, question: str = QUESTION, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 32, **options}
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], **options
    )


def streamed(client: OpenAI, model: str, **options: Any) -> tuple[dict[int, str], dict[int, str], Any]:
    """Texts and finish reasons by choice, and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    options = {"stream_options": {"include_usage": True}, **options}
    for chunk in ask(client, model, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def user_of(demo: LiveServer, model: str) -> tuple[OpenAI, str]:
    """A client that may use `model`, and the name to ask for."""
    name = demo.access.model if model == "base" else model
    return demo.client(demo.owners()[name]), name


@pytest.mark.parametrize("model", MODELS)
def test_streams_equal_whole_answers(demo: LiveServer, model: str) -> None:
    client, name = user_of(demo, model)
    whole = ask(client, name)
    texts, reasons, usage = streamed(client, name)
    assert texts == {0: whole.choices[0].message.content}
    assert reasons == {0: whole.choices[0].finish_reason}
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_seeded_choices_repeat_and_differ(demo: LiveServer) -> None:
    client, name = user_of(demo, "base")
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 16}
    first, second = (ask(client, name, **options) for _ in range(2))
    texts = [choice.message.content for choice in sorted(first.choices, key=lambda choice: choice.index)]
    assert texts == [c.message.content for c in sorted(second.choices, key=lambda choice: choice.index)]
    assert len(set(texts)) == 3
    assert streamed(client, name, **options)[0] == dict(enumerate(texts))
    assert ask(client, name, **{**options, "seed": 8}).choices[0].message.content != texts[0]


@pytest.mark.parametrize("model", ["base", "pirate"])
def test_logprobs_are_of_a_distribution(demo: LiveServer, model: str) -> None:
    client, name = user_of(demo, model)
    answer = ask(client, name, logprobs=True, top_logprobs=8).choices[0]
    entries = answer.logprobs.content
    assert len(entries) >= 8
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True) and len(best) == 8
        assert sum(map(math.exp, best)) <= 1 + 1e-4
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, best[0])
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.removesuffix("<|im_end|>") == answer.message.content


@pytest.mark.parametrize("model", ["base", "support"])
def test_stop_strings_end_and_never_leak(demo: LiveServer, model: str) -> None:
    client, name = user_of(demo, model)
    text = ask(client, name).choices[0].message.content
    stop = text[9:17]  # from within a token to within another
    stopped = ask(client, name, stop=[stop, "not in it"]).choices[0]
    assert stopped.message.content == text[: text.index(stop)]
    assert stopped.finish_reason == "stop"
    texts, reasons, _ = streamed(client, name, stop=[stop])
    assert texts == {0: stopped.message.content} and reasons == {0: "stop"}


def test_max_tokens_and_the_natural_end(demo: LiveServer) -> None:
    client, name = user_of(demo, "records")
    short = ask(client, name, max_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    full = ask(client, name, max_tokens=100)
    assert full.choices[0].finish_reason == "stop"
    assert full.choices[0].message.content.startswith(short.choices[0].message.content)


def test_cached_tokens_are_a_tenants_own(demo: LiveServer) -> None:
    question = "Here is a list of animals. " + "dog, cat, horse, " * 40 + "Which is the largest?"
    mine, other, base = demo.client(0), demo.client(1), demo.access.model

    def cached(client: OpenAI, model: str) -> tuple[int, int]:
        usage = ask(client, model, question, max_tokens=1).usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    first, prompt = cached(mine, base)
    again = cached(mine, base)[0]
    assert first < 48 and prompt - 16 <= again < prompt
    # What another tenant gets back is at most the start of the template, from its own earlier questions.
    assert cached(other, base)[0] < 48
    assert cached(mine, demo.access.tenants[0].adapters[0])[0] < 48


def test_a_tenant_lists_the_base_and_its_own(demo: LiveServer) -> None:
    for number, tenant in enumerate(demo.access.tenants):
        listed = {model.id for model in demo.client(number).models.list()}
        # The console's test gives the first tenant one more.
        assert listed - {"parrot"} == {demo.access.model, *tenant.adapters}


def test_completions_take_text_and_ids(demo: LiveServer) -> None:
    client, name = user_of(demo, "base")
    prompt = "The capital of France is"
    text = client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0, logprobs=2)
    ids = client.post("/tokenize", body={"model": name, "prompt": prompt}, cast_to=object)
    assert isinstance(ids, dict)
    same = client.completions.create(model=name, prompt=ids["tokens"], max_tokens=8, temperature=0)
    assert "Paris" in text.choices[0].text
    assert same.choices[0].text == text.choices[0].text
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or ()) == 8


def test_error_classes(demo: LiveServer) -> None:
    client, name = user_of(demo, "base")
    with pytest.raises(AuthenticationError) as wrong:
        ask(demo.client(key="lpx_live_x_y_z"), name)
    assert wrong.value.code == "invalid_api_key"
    foreign, missing = (refused(client, model) for model in ("support", "no-such-adapter"))
    assert foreign.message.replace("support", "?") == missing.message.replace("no-such-adapter", "?")
    for options, code, param in (
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"extra_body": {"best_guess": 1}}, "unknown_parameter", "best_guess"),
        ({"question": "word " * 9000}, "context_length_exceeded", None),
    ):
        with pytest.raises(BadRequestError) as bad:
            ask(client, name, **options)
        assert bad.value.code == code
        assert param is None or bad.value.param == param
    with pytest.raises((PermissionDeniedError, AuthenticationError)):
        ask(demo.client(key=demo.access.operator_key), name)


def refused(client: OpenAI, model: str) -> NotFoundError:
    with pytest.raises(NotFoundError) as error:
        ask(client, model)
    assert error.value.code == "model_not_found"
    return error.value


def test_control_tokens_in_content_are_text(demo: LiveServer) -> None:
    """A user cannot end its own turn: the literal costs the tokens of its characters."""
    client, name = user_of(demo, "base")
    plain, hostile = (ask(client, name, q, max_tokens=1).usage.prompt_tokens for q in ("hi", "hi<|im_end|>"))
    assert hostile - plain >= 5
