"""Thinking blocks from a model that thinks: asked for, sealed, shown or not, counted, and given back in the next turn."""

from typing import Any

import pytest
from tests.platform.conftest import build_tokenizer
from tests.platform.web.anthropic.wire import HELLO, added_up, body, events_of, message_of, without_ids
from tests.platform.web.openai.test_thought import THINKING

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.spec import decode_spec

PATH = "/v1/messages"
THOUGHT = ("<think>", "\n", "I see", ". So", "\n", "</think>", "\n\n", "It is", " 4")
ON: dict[str, Any] = {"type": "enabled", "budget_tokens": 20}


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return build_tokenizer(THINKING)


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
async def test_a_thought_is_a_block_before_the_text(start_gateway: Any, display: str | None) -> None:
    gateway = await start_gateway(FakeScript(answers=(THOUGHT,)))
    given = body(thinking={**ON, "display": display})
    whole = message_of((await gateway.post(PATH, given)).content)
    events = events_of((await gateway.post(PATH, {**given, "stream": True})).text)
    assert added_up(events) == without_ids(whole)
    thought, text = whole["content"]
    assert thought["type"] == "thinking" and text["text"].strip() == "It is 4" and thought["signature"]
    assert ("I see. So" in thought["thinking"]) == (display != "omitted")
    # The thought comes back by its seal, whatever the block shows.
    history = [*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO]
    await gateway.post(PATH, body(messages=history, thinking=ON))
    ids = list(gateway.engine.requests[-1].prompt_token_ids)
    prompt = (await gateway.post("/v1/detokenize", {"model": "demo/base", "tokens": ids})).json()["prompt"]
    assert "<think>\nI see. So" in prompt


@pytest.mark.parametrize(
    ("thinking", "config", "most"),
    [
        ({"type": "enabled", "budget_tokens": 7}, {}, 7),
        ({"type": "enabled", "budget_tokens": 100}, {"effort": "low"}, 100),
        ({"type": "adaptive"}, {"effort": "low"}, 80),
        ({"type": "adaptive"}, {}, None),
        ({"type": "between_tools"}, {"effort": "low"}, 80),
        ({"type": "enabled", "budget_tokens": 0}, {"effort": "high"}, 0),
        ({"type": "disabled"}, {"effort": "high"}, 0),
        (None, {"effort": "high"}, 0),
    ],
)
async def test_how_long_it_thinks(start_gateway: Any, thinking: Any, config: Any, most: int | None) -> None:
    gateway = await start_gateway(FakeScript(answers=(THOUGHT,)))
    response = await gateway.post(PATH, body(thinking=thinking, output_config=config))
    assert response.status_code == 200, response.text
    [request] = gateway.engine.requests
    kinds = [block["type"] for block in message_of(response.content)["content"]]
    assert (kinds[0] == "thinking") == (most != 0)
    thought = None if request.grammar is None else decode_spec(request.grammar).thought
    assert (None if thought is None else thought.most) == (most or None)
    ignored = response.headers.get("x-loraplex-ignored-parameters")
    assert ignored == ("output_config.effort" if config and most == 0 else None)


async def test_a_budget_of_nothing_lets_an_answer_be_continued(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("4",),)))
    messages = [*HELLO, {"role": "assistant", "content": "It is "}]
    response = await gateway.post(PATH, body(messages=messages, thinking={**ON, "budget_tokens": 0}))
    assert message_of(response.content)["content"][0]["text"] == "4"


async def test_stop_sequences_count_behind_the_thought(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=((*THOUGHT, ". I see", " more"),)))
    given = body(thinking=ON, stop_sequences=["see"])
    whole = message_of((await gateway.post(PATH, given)).content)
    events = events_of((await gateway.post(PATH, {**given, "stream": True})).text)
    assert added_up(events) == without_ids(whole)
    thought, text = whole["content"]
    assert "I see. So" in thought["thinking"] and text["text"].strip() == "It is 4. I"
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "see")


async def test_a_model_that_does_not_think_takes_no_budget(
    start_gateway: Any, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build_tokenizer()
    monkeypatch.setattr(chat_tokenizer, "chat_template", plain.chat_template)
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    refused = await gateway.post(PATH, body(thinking=ON))
    assert refused.status_code == 400
    assert "`thinking.budget_tokens` must be absent or 0" in refused.json()["error"]["message"]
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 0}, {"type": "disabled"}):
        served = await gateway.post(PATH, body(thinking=thinking, output_config={"effort": "high"}))
        assert served.status_code == 200, served.text
