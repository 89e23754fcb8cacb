"""Requests to a small engine, and what is asserted of their events."""

import asyncio
from typing import Any

import msgspec

from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import (
    AdapterRef,
    Delta,
    EngineRequest,
    EngineStats,
    Event,
    Finished,
)
from loraplex.engine.sampling_params import SamplingParams

VOCAB = 128
NAMESPACE = bytes(32)


def request(
    request_id: str = "r", *, adapter: str | None = None, grammar: bytes | None = None, **sampling: Any
) -> EngineRequest:
    settings = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=request_id,
        namespace=NAMESPACE,
        prompt_token_ids=[5, 9, 17],
        sampling=SamplingParams(**settings),
        adapter=AdapterRef(namespace=NAMESPACE, digest=adapter, blob_path="") if adapter else None,
        grammar=grammar,
    )


def replace_namespace(wanted: EngineRequest, namespace: bytes) -> EngineRequest:
    return msgspec.structs.replace(wanted, namespace=namespace)


async def collect(engine: LocalEngine, wanted: EngineRequest) -> list[Event]:
    return [event async for event in engine.submit(wanted)]


def text(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


def tokens(events: list[Event], choice: int = 0) -> list[int]:
    return [i for e in events if isinstance(e, Delta) and e.choice == choice for i in e.token_ids]


def finished(events: list[Event]) -> list[Finished]:
    return [event for event in events if isinstance(event, Finished)]


async def idle(core: Engine) -> EngineStats:
    """The engine's numbers once it holds nothing, which must come to pass without further ado."""
    async with asyncio.timeout(60):
        while core.has_unfinished:
            await asyncio.sleep(0.005)
    stats = core.stats()
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert core.adapters.num_pinned == 0
    return stats
