"""Chat completions that a gateway requests of itself, in the name of a key: those of evaluations.

Invariant: such a request passes what a client's does: limits, admission, ledger, metrics, access log. Only its secret is not asked.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.evaluations.answers import Reply
from loraplex.platform.web.inference_plane import plane_of
from loraplex.platform.web.openai.chat_completions import DIALECT, chat_completions

PATH: Final = "/v1/chat/completions"
HOST: Final = "http://evaluation"


class OwnRequests:
    """Sends requests through the application `app`. `around`: what every request passes."""

    def __init__(self, app: FastAPI, around: Callable[[ASGIApp], ASGIApp]) -> None:
        self._app = app
        self._around = around(_generate)

    async def ask(self, caller: Caller, body: Mapping[str, Any]) -> Reply:
        """Request a chat completion as `caller`."""

        async def as_caller(scope: Scope, receive: Receive, send: Send) -> None:
            state = {"caller": caller, "tenant_id": caller.tenant_id, "key_id": caller.key_id}
            await self._around(
                {**scope, "app": self._app, "endpoint": chat_completions, "state": state}, receive, send
            )

        began = time.perf_counter()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=as_caller), base_url=HOST) as client:
            response = await client.post(PATH, json=body)
        return Reply(response.status_code, response.json(), response.headers, time.perf_counter() - began)


async def _generate(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    response = await plane_of(request).generate(request, request.state.caller, DIALECT)
    await response(scope, receive, send)
