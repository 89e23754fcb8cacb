"""What `/v1/responses` refuses by name: fields that are not offered, and thought that was sealed for others."""

from typing import Any
from uuid import UUID

import pytest
from tests.platform.web.openai.responses_events import MODEL, PATH
from tests.platform.web.openai.test_responses import CRM, TEXTS
from tests.platform.web.openai.test_responses_reading import context

from loraplex.tenants.accounts.tenants import TenantRepository


@pytest.mark.parametrize("change", ["altered", "tenant", "model", "foreign"])
async def test_thought_sealed_for_others_is_refused(start_gateway: Any, change: str) -> None:
    gateway = await start_gateway(TEXTS)
    async with gateway.database.as_operator() as session:
        tenant = (await TenantRepository(session).get("acme")).id
    seal = context(tenant=UUID(int=2) if change == "tenant" else tenant).seal
    sealed = seal.seal("other" if change == "model" else MODEL, "I think.")
    good = context(tenant=tenant).seal.seal(MODEL, "I think.")
    if change in ("altered", "foreign"):
        sealed = (
            f"{good[:20]}{'A' if good[20] != 'A' else 'B'}{good[21:]}" if change == "altered" else "gAAAAA=="
        )
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed},
    ]
    refused = await gateway.post(PATH, {"model": MODEL, "input": items})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1].encrypted_content"
    items[1]["encrypted_content"] = good
    assert (await gateway.post(PATH, {"model": MODEL, "input": items})).status_code == 200


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "store": ({"store": True}, "store", "unsupported_parameter"),
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    "background": ({"background": True}, "background", "unsupported_parameter"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    "context": (
        {"context_management": [{"type": "compaction"}]},
        "context_management",
        "unsupported_parameter",
    ),
    "moderation": ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
    "reference": ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "unsupported_parameter"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input[0].content[0]",
        "unsupported_parameter",
    ),
    "file": (
        {
            "input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_file", "file_id": "f"}],
                },
            ]
        },
        "input[1].output[0]",
        "unsupported_parameter",
    ),
    "unknown output": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
        "input[0].call_id",
        "invalid_value",
    ),
    "twice": (
        {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}] * 2},
        "input[1].call_id",
        "invalid_value",
    ),
    "collision": (
        {"tools": [CRM, {"type": "custom", "name": "crm__find"}]},
        "tools[1].name",
        "invalid_value",
    ),
    "nested": ({"tools": [{**CRM, "tools": [CRM]}]}, "tools[0].tools[0]", "invalid_value"),
    "129 tools": (
        {"tools": [{"type": "function", "name": f"f{index}"} for index in range(129)]},
        "tools",
        "invalid_value",
    ),
    "include": ({"include": ["file_search_call.results"]}, "include[0]", "invalid_value"),
    "top_logprobs": ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    "too long": ({"max_output_tokens": 4096}, "input", "context_length_exceeded"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}},
        "text.format.schema",
        "invalid_schema",
    ),
    "unknown": ({"temprature": 1}, "temprature", "unknown_parameter"),
    "of chat": ({"messages": []}, "messages", "unknown_parameter"),
    "personality": ({"personality": "friendly"}, "personality", "unsupported_parameter"),
}


async def test_what_is_not_offered_is_refused_by_name(start_gateway: Any) -> None:
    gateway = await start_gateway(TEXTS)
    for name, (fields, param, code) in REFUSED.items():
        response = await gateway.post(PATH, {"model": MODEL, "input": "hello", **fields})
        error = response.json()["error"]
        assert response.status_code == 400, name
        assert (error["param"], error["code"]) == (param, code), error
        assert param in error["message"] or name == "too long", error
    assert not gateway.engine.requests
