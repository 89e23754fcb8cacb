"""A gateway whose engine answers each request as `scripted_answers` says.

Invariant: requests come one after another, so that each finds its own answer.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from tests.outside.clients.scripted_answers import (
    MESSAGES,
    RESPONSES,
    Answer,
    answer_to,
    text_of,
    thoughtful,
)

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeEngine, FakeScript

DIALECTS = (RESPONSES, MESSAGES, "/v1/chat/completions")
# Claude Code asks for 32,000 tokens.
INFO = msgspec.structs.replace(DEFAULT_INFO, max_model_len=131_072, num_blocks=8192)


def script_of(answer: Answer) -> FakeScript:
    """An engine that writes this answer."""
    return FakeScript(info=INFO, answers=(text_of(answer),))


class ScriptedAnswers:
    """The application, which gives the engine its script. `answers` come before those of `answer_to`."""

    def __init__(self, app: Any, engine: FakeEngine, answers: Sequence[Answer] = ()) -> None:
        self._app = app
        self._engine = engine
        self._answers = list(answers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] != "POST" or scope["path"] not in DIALECTS:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        content = b"".join(message.get("body", b"") for message in messages)
        self._engine.script = script_of(self._answer(scope["path"], json.loads(content)))

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    def _answer(self, path: str, body: Any) -> Answer:
        return thoughtful(self._answers.pop(0), body) if self._answers else answer_to(path, body)
