"""Forced tokens in the stream, and aborts while a grammar is compiled."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.messages import (
    Delta,
    Finished,
)
from loraplex.engine.model_loading import LoadedModel

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

from tests.engine.local_engine.conftest import Source
from tests.engine.local_engine.engine_requests import collect, finished, request, text, tokens


class Grammars:
    """Hands out masks of one document, `FORCED` after two choices, as soon as `gate` is open."""

    def __init__(self, scripted_mask: "type[ScriptedMask]") -> None:
        self._mask = scripted_mask
        self.asked, self.gate = threading.Event(), threading.Event()

    def __call__(self, namespace: bytes, grammar: bytes) -> "ScriptedMask":
        self.asked.set()
        assert self.gate.wait(60)
        return self._mask([(first, *FORCED) for first in (20, 21)], fast_forward=True)


FORCED = (30, 31, 32, 33)


@pytest.fixture
async def grammars(
    model: LoadedModel, settings: EngineConfig, source: Source, scripted_mask: "type[ScriptedMask]"
) -> AsyncIterator[tuple[Grammars, LocalEngine]]:
    factory = Grammars(scripted_mask)
    local = LocalEngine(Engine(model, settings, source, mask_factory=factory))
    yield factory, local
    factory.gate.set()
    source.gate.set()
    await local.close()


async def test_forced_tokens_come_in_one_delta(grammars: tuple[Grammars, LocalEngine]) -> None:
    factory, engine = grammars
    factory.gate.set()
    events = await collect(engine, request(grammar=b"{}"))
    assert tokens(events)[1:] == list(FORCED) and tokens(events)[0] in (20, 21)
    assert sum(isinstance(event, Delta) for event in events) == 1
    (end,) = finished(events)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", None, 5)
    assert text(events).endswith("<30><31><32><33>")


async def test_a_stop_string_among_forced_tokens_cuts_the_rest(
    grammars: tuple[Grammars, LocalEngine],
) -> None:
    factory, engine = grammars
    factory.gate.set()
    events = await collect(engine, request(grammar=b"{}", stop=("<31>",)))
    (end,) = finished(events)
    assert (end.reason, end.stop, end.usage.completion_tokens) == ("stop", "<31>", 3)
    assert text(events).endswith("<30>")


async def test_an_abort_while_the_grammar_is_compiled(grammars: tuple[Grammars, LocalEngine]) -> None:
    factory, engine = grammars
    first = asyncio.ensure_future(anext(engine.submit(request("waits", grammar=b"{}"))))
    assert await asyncio.to_thread(factory.asked.wait, 60)
    assert len(tokens(await collect(engine, request("free")))) == 12
    await engine.abort("waits")
    aborted = await first
    assert isinstance(aborted, Finished) and aborted.reason == "abort"
    factory.gate.set()
    assert finished(await collect(engine, request("next", grammar=b"{}")))[0].reason == "stop"
    assert (await engine.stats()).waiting_for_grammar == 0
