"""Clients that disconnect during a compile check or a validation: their slots and reservations are freed at once."""

import asyncio
import json
from typing import Any

import pytest

from loraplex.engine.fake_engine import FakeScript
from loraplex.grammar.spec import GrammarSpec
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.workers.pool import WorkerPool

LIMITS = ServingConfig(max_in_flight=1, key_cache_s=0.0)
# The first request may have to start a worker process on a machine that is busy.
BUSY_S = 180.0
PLAIN: Any = {"model": "demo/base", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def formed(schema: object, stream: bool) -> dict[str, Any]:
    return {**PLAIN, "max_tokens": 100, "structured_outputs": {"json": schema}, "stream": stream}


def endless() -> dict[str, Any]:
    """Asks for 2 ** 30 looks at one value."""
    levels: dict[str, Any] = {"d0": {"type": "array", "uniqueItems": True}}
    for level in range(30):
        levels[f"d{level + 1}"] = {"anyOf": [{"$ref": f"#/$defs/d{level}"}] * 2}
    return {"$defs": levels, "$ref": "#/$defs/d30"}


async def answered_soon(gateway: Any) -> None:
    """The one place of the gateway is free again, and nothing of either request is left."""
    admissions = gateway.admissions
    async with asyncio.timeout(BUSY_S):
        while (await gateway.post("/v1/chat/completions", PLAIN)).status_code != 200:
            await asyncio.sleep(0.02)
        # What is left of the other request ends in the background.
        while len(admissions.settled) + len(admissions.cancelled) < len(admissions.asked):
            await asyncio.sleep(0.02)
    assert gateway.engine.running == 0


async def leave(gateway: Any, body: object, reached: asyncio.Event) -> None:
    leaving = asyncio.create_task(gateway.post("/v1/chat/completions", body))
    reaching = asyncio.create_task(reached.wait())
    async with asyncio.timeout(BUSY_S):
        await asyncio.wait({leaving, reaching}, return_when=asyncio.FIRST_COMPLETED)
    assert not leaving.done(), leaving.result().text
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_a_grammar_is_checked(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(limits=LIMITS)
    reached, released = asyncio.Event(), asyncio.Event()

    async def check(namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        try:
            reached.set()
            await asyncio.Event().wait()
        finally:
            released.set()

    gateway.compile_checks.check = check
    await leave(gateway, formed({"type": "object"}, stream), reached)
    await answered_soon(gateway)
    assert released.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_while_a_value_is_validated(
    start_gateway: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()
    gateway = await start_gateway(FakeScript(answers=((json.dumps([1, 1]),),)), LIMITS)

    run = WorkerPool.run

    async def validate(pool: WorkerPool, task: Any, *arguments: Any) -> Any:
        if task.name == "value_validation":
            reached.set()
        return await run(pool, task, *arguments)

    monkeypatch.setattr(WorkerPool, "run", validate)
    await leave(gateway, formed(endless(), stream), reached)
    await answered_soon(gateway)
    assert len(gateway.recorder.timings) == 2
