"""Puts the real engine together: decoder and adapter source. Imported only inside the engine process, since it imports
torch, which the gateway process never does.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from loraplex.adapters.source import PeftAdapterSource
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.loading import load_model
from loraplex.engine.local_engine import LocalEngine
from loraplex.engine.step_thread import StepThread


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and the thread that made it, which is the one to run its steps."""

    engine: Engine
    steps: StepThread


def load_engine(config: EngineConfig, cores: set[int]) -> LoadedEngine:
    """Load the model and allocate its KV pool. Raises `ModelError`. `cores` are those the process may use."""
    steps = StepThread()
    return LoadedEngine(steps.submit(partial(_load, config, cores)).result(), steps)


def _load(config: EngineConfig, cores: set[int]) -> Engine:
    model = load_model(config)
    # Loading bound this thread to a core; the adapter loader, made next, would inherit that and queue behind it.
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    engine = Engine(model, config, PeftAdapterSource(model.config, model.dtype, model.digest))
    os.sched_setaffinity(0, bound)
    return engine


@asynccontextmanager
async def running(loaded: LoadedEngine) -> AsyncIterator[EngineClient]:
    """The engine with its threads, which end on leaving."""
    local = LocalEngine(loaded.engine, loaded.steps)
    try:
        yield local
    finally:
        await local.close()
