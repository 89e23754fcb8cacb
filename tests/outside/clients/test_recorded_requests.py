"""What real clients sent is served, and each answer is one that the types of their packages read.

`recorded/` has requests of clients, `variants/` hand-written ones with fields that peers and newer clients know.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
from anthropic.types import Message, MessageTokensCount, ModelInfo
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.decision import Decision
from openai.types.responses import Response
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import ValidationError
from tests.outside.clients.environments import AGENTS, CLIENTS
from tests.outside.clients.named_events import message_in, response_in
from tests.outside.clients.scripted_answers import (
    MESSAGES,
    RESPONSES,
    SEAL,
    SENTENCE,
    THOUGHT,
    Answer,
    answer_to,
)
from tests.outside.clients.scripted_engine import DIALECTS, INFO, script_of

from loraplex.engine.fake_engine import FakeScript

HERE = Path(__file__).parent
DECISIONS = "/v1/decisions"
FILES = sorted((*HERE.glob("recorded/*.json"), *HERE.glob("variants/*.json")))
# Read whole in each dialect: the endpoints that answer without a model.
COUNTS: dict[str, Any] = {
    f"{RESPONSES}/input_tokens": InputTokenCountResponse,
    f"{MESSAGES}/count_tokens": MessageTokensCount,
}


async def test_every_request_is_served(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(info=INFO))
    wrong: list[str] = []
    assert {file.stem for file in FILES} >= {*CLIENTS, *AGENTS}
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        client.headers["authorization"] = f"Bearer {gateway.key}"
        seal = await seal_of(gateway, client)
        for file in FILES:
            for request in json.loads(file.read_text().replace(SEAL, seal))["requests"]:
                chats = path_of(request) in DIALECTS
                answer = answer_to(request["path"], request["body"]) if chats else Answer(SENTENCE)
                gateway.engine.script = script_of(answer)
                response = await send(client, request)
                if fault := fault_of(request, response, answer):
                    wrong.append(f"{file.stem}: {fault} for {request}")
    assert not wrong, "\n".join(wrong)


async def seal_of(gateway: Any, client: httpx.AsyncClient) -> str:
    """The gateway's own seal of what was thought in the recorded answers."""
    gateway.engine.script = script_of(Answer(SENTENCE, thought=THOUGHT))
    body = {"model": "demo/base", "input": "How is the weather?", "include": ["reasoning.encrypted_content"]}
    answer = Response.model_validate((await client.post(RESPONSES, json=body)).json())
    [seal] = [item.encrypted_content for item in answer.output if item.type == "reasoning"]
    assert seal
    return seal


def path_of(request: dict[str, Any]) -> str:
    path: str = request["path"].partition("?")[0].rstrip("/")
    return path


def fault_of(request: dict[str, Any], response: httpx.Response, answer: Answer) -> str | None:
    """What is wrong with the answer, if anything."""
    if "thread" in (request["body"] or {}):
        # The client then sends the whole history.
        code = response.json()["error"].get("details", {}).get("error_code")
        return None if code == "thread_unsupported_request" else response.text
    if response.status_code >= 400:
        return f"{response.status_code} {response.text}"
    try:
        check(request, response, answer)
    except (AssertionError, ValidationError) as error:
        return f"{error!r} in {response.text}"
    return None


async def send(client: httpx.AsyncClient, request: dict[str, Any]) -> httpx.Response:
    """Its answer. `body` becomes JSON, compressed if its header says so."""
    content = b"" if request["body"] is None else json.dumps(request["body"]).encode()
    if request["headers"].get("content-encoding") == "gzip":
        content = gzip.compress(content)
    return await client.request(
        request["method"], request["path"], headers=request["headers"], content=content
    )


def check(request: dict[str, Any], response: httpx.Response, answer: Answer) -> None:
    """The answer has the type of its endpoint, and what the model wrote: a text or a call."""
    path, body = path_of(request), request["body"]
    if path == "/v1/models":
        kind: Any = ModelInfo if "anthropic-version" in request["headers"] else Model
        assert [kind.model_validate(each) for each in response.json()["data"]]
    elif path.startswith("/v1/models/"):
        Model.model_validate(response.json())
    elif path in COUNTS:
        assert COUNTS[path].model_validate(response.json()).input_tokens
    elif path == DECISIONS:
        decision = Decision.model_validate_json(response.text, strict=True)
        assert [each.name for each in decision.answers] == [each["name"] for each in body["questions"]]
    elif path == RESPONSES:
        check_response(response_in(response.text) if body.get("stream") else response.text, answer)
    elif path == MESSAGES:
        shown = (body.get("thinking") or {}).get("display") != "omitted"
        check_message(message_in(response.text) if body.get("stream") else response.text, answer, shown)
    elif path not in ("/v1/chat/completions", "/v1/completions"):
        return
    elif body.get("stream"):
        check_stream(body, response.text, answer, path)
    elif path == "/v1/completions":
        completion = read_completion(response.text)
        assert completion.usage and completion.choices[0].text
    else:
        chat = ChatCompletion.model_validate(response.json())
        message = chat.choices[0].message
        assert chat.usage
        calls: Any = message.tool_calls or ()
        assert [call.function.name for call in calls] == ([answer.name] if answer.name else [])
        assert answer.name or message.content == answer.text


def check_response(text: str, answer: Answer) -> None:
    """A response that thought what the model thought, and says what it wrote, or calls what it called."""
    response: Any = Response.model_validate_json(text)
    assert response.usage and response.status in ("completed", "incomplete")
    *thoughts, said = response.output
    assert all(item.type == "reasoning" for item in thoughts), thoughts
    thought = "".join(part.text for item in thoughts for part in item.content)
    assert thought == (answer.thought or ""), thoughts
    if answer.name is None:
        assert said.type == "message" and response.output_text == answer.text
    else:
        assert said.type == ("custom_tool_call" if answer.custom else "function_call"), said
        assert (said.namespace, said.name) == (answer.namespace, answer.name)
        written = said.input if answer.custom else json.loads(said.arguments)
        assert written == (answer.text if answer.custom else json.loads(answer.text))


def check_message(text: str, answer: Answer, shown: bool) -> None:
    """A message that thought what the model thought, sealed alone unless `shown`, and says or calls what it wrote."""
    message: Any = Message.model_validate_json(text)
    assert message.usage.output_tokens
    *thoughts, said = message.content
    assert all(block.type == "thinking" and block.signature for block in thoughts), thoughts
    assert bool(thoughts) == bool(answer.thought)
    assert "".join(block.thinking for block in thoughts) == (
        answer.thought if shown and answer.thought else ""
    )
    if answer.name is None:
        assert said.type == "text" and said.text == answer.text, said
        assert message.stop_reason == "end_turn"
    else:
        assert said.type == "tool_use", said
        assert (said.name, said.input) == (answer.name, json.loads(answer.text))
        assert message.stop_reason == "tool_use"


def check_stream(body: dict[str, Any], text: str, answer: Answer, path: str) -> None:
    """Chunks that join to the answer, a finish reason, usage if it was asked for, and the end."""
    *events, done = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert done == "[DONE]" and events
    if path == "/v1/completions":
        parts: list[Any] = [read_completion(event) for event in events]
        said = "".join(choice.text for part in parts for choice in part.choices)
    else:
        parts = [ChatCompletionChunk.model_validate_json(event) for event in events]
        deltas = [choice.delta for part in parts for choice in part.choices]
        said = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.id] == ([answer.name] if answer.name else [])
        written = "".join(call.function.arguments or "" for call in calls)
        assert answer.name is None or json.loads(written) == json.loads(answer.text)
    assert said == ("" if answer.name else answer.text)
    assert [choice.finish_reason for part in parts for choice in part.choices][-1]
    asked = (body.get("stream_options") or {}).get("include_usage")
    assert bool(parts[-1].usage) == bool(asked)


def read_completion(text: str) -> Completion:
    """A text completion or a chunk of one, in which a null may stand where OpenAI sends it and the package's type has none.

    Chunks before the last have no finish reason, and the first token of a prompt has no log-probability.
    """
    completion = json.loads(text)
    for choice in completion["choices"]:
        assert choice["finish_reason"] in (None, "stop", "length")
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        scores = choice["logprobs"]
        if scores and scores["token_logprobs"][0] is None:
            assert scores["top_logprobs"][0] is None
            scores["token_logprobs"][0], scores["top_logprobs"][0] = 0.0, {}
    return Completion.model_validate(completion)
