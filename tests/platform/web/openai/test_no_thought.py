"""A model without a reasoning style: what asks for thought is refused, dropped aloud, or asks for nothing."""

from typing import Any

import pytest

from loraplex.engine.fake_engine import FakeScript

BODY = {"model": "demo/base", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, None),
        ({"thinking_token_budget": 0}, None),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
async def test_an_effort_is_dropped_aloud(
    start_gateway: Any, fields: dict[str, Any], ignored: str | None
) -> None:
    gateway = await start_gateway(FakeScript(answers=(("<think>", "Hi"),)))
    response = await gateway.post("/v1/chat/completions", {**BODY, **fields})
    assert response.json()["choices"][0]["message"]["content"] == "<think>Hi"
    assert "completion_tokens_details" not in response.json()["usage"]
    assert response.headers.get("x-loraplex-ignored-parameters") == ignored


async def test_a_budget_is_refused(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(answers=(("Hi",),)))
    response = await gateway.post("/v1/chat/completions", {**BODY, "thinking_token_budget": 5})
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget"
