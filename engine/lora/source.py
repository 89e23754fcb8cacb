"""`AdapterSource`: where the engine gets an adapter's tensors. The adapters package implements it."""

from typing import Protocol

from loraplex.engine.lora.weights import LoraWeights
from loraplex.engine.messages import AdapterRef


class AdapterSource(Protocol):
    """Reads local, already validated blobs. Called on the loader thread, never in the step loop."""

    def load(self, adapter: AdapterRef) -> LoraWeights:
        """Return tensors on the CPU. Raises `AdapterLoadFailed` when the blob is missing or unreadable."""
        ...
