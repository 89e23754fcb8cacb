"""A step that hangs, in the forward pass, the sampler or a grammar, is logged once with the stacks of all threads."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs
from tests.engine.local_engine.conftest import Source
from tests.engine.local_engine.engine_requests import collect, finished, request

from loraplex.engine.config import EngineConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.model_loading import LoadedModel

if TYPE_CHECKING:
    from tests.engine.conftest import ScriptedMask

LIMIT_S = 0.2


class Hang:
    """Calls what it replaces, and the first time waits for `release` before."""

    def __init__(self, replaced: Any) -> None:
        self._replaced = replaced
        self.release = threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        assert self.release.wait(60)
        return self._replaced(*arguments, **named)


@pytest.fixture
async def watched(
    model: LoadedModel, settings: EngineConfig, source: Source, scripted_mask: "type[ScriptedMask]"
) -> AsyncIterator[tuple[Engine, LocalEngine]]:
    limited = replace(settings, step_warning_s=LIMIT_S, scheduler=SchedulerConfig(overlap="off"))
    core = Engine(
        model, limited, source, mask_factory=lambda namespace, grammar: scripted_mask([(20, 21, 22)])
    )
    local = LocalEngine(core)
    yield core, local
    source.gate.set()
    await local.close()


@pytest.mark.parametrize(
    ("place", "caller"), [("forward", "_logits"), ("sampler", "sample"), ("grammar", "grammar_advance.py")]
)
async def test_a_step_that_hangs_is_logged_once_with_all_stacks(
    watched: tuple[Engine, LocalEngine],
    monkeypatch: pytest.MonkeyPatch,
    scripted_mask: "type[ScriptedMask]",
    place: str,
    caller: str,
) -> None:
    core, engine = watched
    await collect(engine, request("before"))
    before = (await engine.stats()).slow_steps
    owner, name = {
        "forward": (core.runner, "forward"),
        "sampler": (core.runner._sampler, "start"),
        "grammar": (scripted_mask, "accept"),
    }[place]
    hang = Hang(getattr(owner, name))
    replacement = (lambda mask, token_id: hang(mask, token_id)) if owner is scripted_mask else hang
    monkeypatch.setattr(owner, name, replacement)
    with capture_logs() as logs:
        running = asyncio.create_task(collect(engine, request("slow", grammar=b"{}")))
        async with asyncio.timeout(60):
            while not logs:
                await asyncio.sleep(0.01)
        await asyncio.sleep(3 * LIMIT_S)
        (slow,) = logs
        assert (await engine.stats()).slow_steps == before + 1
        hang.release.set()
        assert finished(await running)
    assert (slow["event"], slow["log_level"]) == ("a step is slow", "warning")
    assert LIMIT_S <= slow["seconds"] < 30
    assert (slow["step"]["rows"], slow["step"]["some_rows"][0].split("#")[0]) == (1, "slow")
    steps = [stack for name, stack in slow["stacks"].items() if name.startswith("engine-steps ")]
    assert any(caller in stack and "release.wait" in stack for stack in steps)
    assert len(slow["stacks"]) > len(steps), "other threads are shown too"
