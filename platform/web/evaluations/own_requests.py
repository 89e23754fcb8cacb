"""Chat completions that a gateway requests of itself, in the name of a key: those of evaluations.

Invariant: such a request passes what a client's does: limits, admission, ledger, metrics, access log. Only its secret is not asked.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.evaluations.answers import Reply
from loraplex.platform.evaluations.runner import asking
from loraplex.platform.web.inference_plane import plane_of
from loraplex.platform.web.openai.chat_completions import DIALECT, chat_completions

HOST: Final = "http://evaluation/v1/"


class OwnRequests:
    """Sends requests through the application `app`. `around`: what every request passes."""

    def __init__(self, app: FastAPI, around: Callable[[ASGIApp], ASGIApp]) -> None:
        self._app = app
        self._around = around(_generate)

    async def ask(self, caller: Caller, body: Mapping[str, Any]) -> Reply:
        """Request a chat completion as `caller`."""

        async def as_caller(scope: Scope, receive: Receive, send: Send) -> None:
            ids = {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "api_key_id": caller.api_key_id}
            await self._around(
                {**scope, "app": self._app, "endpoint": chat_completions, "state": {"caller": caller, **ids}},
                receive,
                send,
            )

        transport = httpx.ASGITransport(app=as_caller)
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            return await asking(client)(body)


async def _generate(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    response = await plane_of(request).generate(request, request.state.caller, DIALECT)
    await response(scope, receive, send)
