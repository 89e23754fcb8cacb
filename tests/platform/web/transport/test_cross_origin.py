"""What a page of a browser may read: `/v1` from the named origins, nothing else; slashes at the end; anonymous routes."""

from typing import Any

import httpx
import pytest

from loraplex.platform.inference.dependencies import ServingConfig

PAGE = "https://app.example.com"
BODY = {"model": "demo/base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
ASKED = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/tokenize", "/v1/nothing")


async def send(gateway: Any, method: str, path: str, headers: dict[str, str], **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        return await client.request(method, path, headers=headers, **more)


def shared(response: httpx.Response) -> str | None:
    assert "access-control-allow-credentials" not in response.headers
    allowed: str | None = response.headers.get("access-control-allow-origin")
    return allowed


@pytest.mark.parametrize("path", PATHS)
async def test_a_preflight_needs_no_key(start_gateway: Any, path: str) -> None:
    gateway = await start_gateway(limits=ServingConfig(allowed_origins=(PAGE,)))
    allowed = await send(gateway, "OPTIONS", path, ASKED)
    assert (allowed.status_code, shared(allowed)) == (200, PAGE)
    assert allowed.headers["access-control-allow-methods"] == "GET, POST"
    assert allowed.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    assert "origin" in allowed.headers["vary"].lower() and allowed.headers["x-request-id"]
    for other in ("https://app.example.com.evil.net", "http://app.example.com", "null"):
        refused = await send(gateway, "OPTIONS", path, {**ASKED, "origin": other})
        assert (refused.status_code, shared(refused)) == (400, None)


async def test_answers_and_errors_are_readable_by_the_named_origin_alone(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(allowed_origins=(PAGE,)))
    key = {"authorization": f"Bearer {gateway.key}"}
    for headers, status in (({**key, "origin": PAGE}, 200), ({"origin": PAGE}, 401)):
        answer = await send(gateway, "POST", PATHS[0], headers, json=BODY)
        assert (answer.status_code, shared(answer)) == (status, PAGE)
        assert (
            answer.headers["access-control-expose-headers"] == "*"
            and "origin" in answer.headers["vary"].lower()
        )
    wrong = await send(gateway, "POST", PATHS[0], {**key, "origin": PAGE}, json={**BODY, "no_such": 1})
    assert (wrong.status_code, shared(wrong)) == (400, PAGE)
    stranger = await send(gateway, "POST", PATHS[0], {**key, "origin": "https://evil.net"}, json=BODY)
    assert (stranger.status_code, shared(stranger)) == (200, None)


@pytest.mark.parametrize(
    "path", ["/tenant/v1/me", "/operator/v1/tenants", "/openapi.json", "/console", "/metrics"]
)
async def test_no_other_plane_is_shared(start_gateway: Any, path: str) -> None:
    gateway = await start_gateway(limits=ServingConfig(allowed_origins=("*",)))
    assert shared(await send(gateway, "OPTIONS", path, ASKED)) is None
    assert shared(await send(gateway, "GET", path, {"origin": PAGE})) is None
    every = await send(gateway, "OPTIONS", PATHS[0], ASKED)
    assert (every.status_code, shared(every)) == (200, "*")


async def test_without_the_setting_nothing_is_shared(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for path in PATHS:
        answer = await send(gateway, "OPTIONS", path, ASKED)
        assert shared(answer) is None and answer.status_code in (404, 405)


async def test_a_slash_at_the_end_is_served(start_gateway: Any) -> None:
    gateway = await start_gateway()
    key = {"authorization": f"Bearer {gateway.key}"}
    for path in ("/v1/chat/completions/", "/v1/tokenize/"):
        body = BODY if "chat" in path else {"model": "demo/base", "prompt": "Hi"}
        answer = await send(gateway, "POST", path, key, json=body)
        assert answer.status_code == 200 and not answer.history
    for path in ("/v1/models/", "/v1/models/demo/base/"):
        assert (await send(gateway, "GET", path, key)).status_code == 200
    for path in ("/v1/models//", "/v1/", "/v1/nothing/", "/tenant/v1/me/"):
        assert (await send(gateway, "GET", path, key)).status_code == 404
