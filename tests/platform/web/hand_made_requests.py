"""Requests built without a server, as routes receive them."""

import json
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from starlette.requests import Request

from loraplex.platform.web.transport.body_budget import BodyBudget

APP: Final = SimpleNamespace(state=SimpleNamespace(body_budget=BodyBudget(1 << 20)))


def request(
    method: str = "GET",
    path: str = "/tenant/v1/things",
    query: str = "",
    headers: dict[str, str] | None = None,
    body: object = b"",
) -> Request:
    """`body` as JSON, or bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-length": str(len(content)), **(headers or {})}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "state": {"request_id": "r-1", "tenant_id": UUID(int=1)},
        "app": APP,
    }
    return Request(scope, receive)
