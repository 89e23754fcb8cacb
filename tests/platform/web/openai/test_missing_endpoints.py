"""What is not offered names what to use instead, to everyone and in OpenAI's form; what it names exists."""

import re
from typing import Any

import httpx
import openai
import pytest
from tests.platform.web.route_table import routes_of

from loraplex.platform.web.openai.missing_endpoints import INSTEAD, instead_of


async def test_the_answer_names_what_to_use_instead(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for instead, name in ((text, name) for text, names in INSTEAD.items() for name in names.split()):
            for method, path in (("POST", name), ("GET", f"{name}/"), ("POST", f"{name}/x_1/y")):
                response = await client.request(method, path)
                assert response.status_code == 404, path
                # A slash at the end of a path of `/v1` is taken off before its route is looked up.
                told = path.rstrip("/") if path.startswith("/v1/") else path
                assert response.json() == {
                    "error": {
                        "message": f"{method} {told}: not found; {instead}",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "not_found",
                    }
                }
    with pytest.raises(openai.NotFoundError, match="use POST /v1/chat/completions") as missing:
        await gateway.client().post("/assistants", cast_to=httpx.Response, body={})
    assert missing.value.code == "not_found"


async def test_what_is_named_exists(start_gateway: Any) -> None:
    gateway = await start_gateway()
    named = {route for text in INSTEAD for route in re.findall(r"POST \S+", text)}
    assert len(named) == 4 and named <= routes_of(gateway.app)


@pytest.mark.parametrize(
    ("path", "beginning"),
    [
        ("/v1/v1/messages", "let the base URL of a client of Anthropic end without /v1"),
        (
            "/v1/conversations/conv_1/items",
            "nothing is stored: send the conversation with POST /v1/responses",
        ),
        ("/v1/embeddings", "use another server"),
        ("/v1/v1/chat/completions", "let the client's base URL end with /v1"),
        ("/chat/completions", "let the client's base URL end with /v1"),
    ],
)
def test_the_longest_path_counts(path: str, beginning: str) -> None:
    assert (instead_of(path) or "").startswith(beginning)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/messagesx", "/tenant/v1/messages", ""])
def test_of_others_there_is_nothing_to_say(path: str) -> None:
    assert instead_of(path) is None
