"""Agents and SDKs, unmodified, against a gateway whose engine writes what a model would: each gets to its end.

Agents are whole programs. They run in a network with nothing but the gateway, and are installed first, so they are long.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.outside.clients.environments import (
    AGENTS,
    RUN_S,
    SCRIPTS,
    NotInstalled,
    command_of,
    variables,
)
from tests.outside.clients.scripted_answers import AGENT_ANSWERS, PATCH, THOUGHT, Answer, text_of
from tests.outside.clients.scripted_engine import INFO, ScriptedAnswers
from tests.outside.clients.sealed_network import can_seal, run_sealed

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.platform.web.transport.docs import index_router

# Those that the tests' own environment has.
SDKS = ("openai_responses", "anthropic", "pydantic_ai_responses", "pydantic_ai_messages")


@pytest.mark.parametrize("sdk", SDKS)
async def test_an_sdk_is_served(start_gateway: Any, sdk: str) -> None:
    gateway = await scripted(start_gateway)
    environment = variables(f"{gateway.url}/v1", gateway.key, "demo/base")
    command = [sys.executable, str(SCRIPTS[sdk])]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    await check_usage(gateway, done.stdout)


@pytest.mark.long
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_finishes_its_turn(start_gateway: Any, chat_tokenizer: Any, agent: str) -> None:
    if shutil.which("node") is None or not can_seal():
        pytest.skip("it needs node, and a user who may make networks")
    try:
        command = await asyncio.to_thread(command_of, agent)
    except NotInstalled as error:
        pytest.fail(str(error))
    gateway = await scripted(start_gateway, AGENT_ANSWERS[agent])
    environment = variables(f"{gateway.url}/v1", gateway.key, "demo/base")
    done = await asyncio.to_thread(run_sealed, command, environment, RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    await check_usage(gateway, done.stdout)
    for request, answer in zip(gateway.engine.requests, AGENT_ANSWERS[agent], strict=True):
        thought = replace(answer, thought=THOUGHT)
        assert accepts(chat_tokenizer, request.grammar, thought), answer
        if answer.text == PATCH:
            empty = replace(thought, text="*** Begin Patch\n*** End Patch\n")
            assert not accepts(chat_tokenizer, request.grammar, empty)


async def test_what_agents_ask_first(start_gateway: Any) -> None:
    """Whether there is a server. Claude Code asks one of the two by its version, without a key."""
    gateway = await start_gateway()
    gateway.app.include_router(index_router(console=False))
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as client:
        assert (await client.head("/")).status_code == 200
        assert (await client.head("/api/hello")).status_code < 500


async def scripted(start_gateway: Any, answers: tuple[Answer, ...] = ()) -> Any:
    """A gateway that answers by script; these answers come first."""
    gateway = await start_gateway(FakeScript(info=INFO))
    gateway.app.direct.app = ScriptedAnswers(gateway.app.direct.app, gateway.engine, answers)
    return gateway


async def check_usage(gateway: Any, output: str) -> None:
    """What the client saw is what the engine read and wrote."""
    stats = await gateway.engine.stats()
    assert json.loads(output.strip().splitlines()[-1]) == {
        "requests": len(gateway.engine.requests),
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generation_tokens,
    }


def accepts(tokenizer: Any, grammar: bytes | None, answer: Answer) -> bool:
    """Whether the request's grammar lets the answer through, to its end; a request without one holds nothing."""
    if grammar is None:
        return True
    vocabulary = Vocabulary(
        tokenizer.backend_tokenizer.to_str(), len(tokenizer), frozenset({tokenizer.eos_token_id})
    )
    mask = MaskCompiler(vocabulary).compile(b"tenant", grammar)
    tokens = tokenizer.backend_tokenizer.encode("".join(text_of(answer)), add_special_tokens=False).ids
    return all(mask.accept(token) for token in tokens) and mask.is_complete()
