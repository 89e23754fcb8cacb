"""Puts the real engine together: decoder and adapter source. Imported only inside the engine process, since it imports
torch, which the gateway process never does.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex.adapters.source import PeftAdapterSource
from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.engine import Engine
from loraplex.engine.loading import load_model
from loraplex.engine.local_engine import LocalEngine


def load_engine(config: EngineConfig) -> Engine:
    """Load the model and allocate its KV pool. Raises `ModelError`."""
    model = load_model(config)
    return Engine(model, config, PeftAdapterSource(model.config, model.dtype, model.digest))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[EngineClient]:
    """The engine with its threads, which end on leaving."""
    local = LocalEngine(engine)
    try:
        yield local
    finally:
        await local.close()
