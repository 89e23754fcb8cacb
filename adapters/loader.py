"""`PeftAdapterSource`: loads a stored adapter as the engine's normalised LoRA tensors on the CPU.

The blob was validated when it was stored. Its structure is matched again, because kernels trust shapes, and its
content is hashed again, because gateways and tenants rely on the digest.
"""

from pathlib import Path

import torch
from torch import Tensor

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.errors import AdaptersError, BlobCorrupt
from loraplex.adapters.limits import DEFAULT_LIMITS, AdapterLimits
from loraplex.adapters.storage.local_store import CONFIG_FILE, WEIGHTS_FILE
from loraplex.adapters.storage.safe_files import (
    OpenFile,
    hash_descriptor,
    open_regular,
    read_exactly,
    read_regular,
)
from loraplex.adapters.target_modules import adaptable_modules
from loraplex.adapters.validation.checks import match_stored
from loraplex.adapters.validation.peft_config import parse_manifest
from loraplex.adapters.validation.safetensors_header import TensorEntry, read_header
from loraplex.adapters.validation.tensor_assignment import LoraPair
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef
from loraplex.engine.models.config import ModelConfig

_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class PeftAdapterSource:
    """The engine's `AdapterSource`. Tensors have `dtype`; the scale is first multiplied into B in float32.

    Without `base_model_digest` digests are not verified: for folders that no registry stored.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        base_model_digest: str | None = None,
        limits: AdapterLimits = DEFAULT_LIMITS,
    ) -> None:
        self._modules = adaptable_modules(model)
        self._dtype = dtype
        self._base_model_digest = base_model_digest
        self._limits = limits

    def load(self, adapter: AdapterRef) -> LoraWeights:
        """Raises `AdapterLoadFailed` when the blob is missing, damaged, or does not fit the model."""
        try:
            modules = self._load_modules(Path(adapter.blob_path), adapter.digest)
        except (AdaptersError, OSError, EOFError) as error:
            raise AdapterLoadFailed(f"adapter {adapter.digest} cannot be loaded: {error}") from error
        return LoraWeights(digest=adapter.digest, modules=modules)

    def _load_modules(self, folder: Path, digest: str) -> dict[str, LoraModule]:
        config = read_regular(folder / CONFIG_FILE, max_bytes=self._limits.max_config_bytes)
        manifest = parse_manifest(config, self._limits)
        with open_regular(folder / WEIGHTS_FILE, max_bytes=self._limits.max_weights_bytes) as weights:
            self._require_digest(digest, config, weights)
            header = read_header(weights, self._limits)
            pairs = match_stored(manifest, header, self._modules)
            return {pair.module.name: self._load_pair(weights.descriptor, pair) for pair in pairs}

    def _require_digest(self, digest: str, config: bytes, weights: OpenFile) -> None:
        if self._base_model_digest is None:
            return
        if adapter_digest(config, hash_descriptor(*weights), self._base_model_digest) != digest:
            raise BlobCorrupt("its content has changed, or its base model is another")

    def _load_pair(self, descriptor: int, pair: LoraPair) -> LoraModule:
        a = self._load_tensor(descriptor, pair.a, 1.0)
        return LoraModule(a=a, b=self._load_tensor(descriptor, pair.b, pair.scale))

    def _load_tensor(self, descriptor: int, entry: TensorEntry, scale: float) -> Tensor:
        content = bytearray(read_exactly(descriptor, entry.nbytes, entry.offset))
        stored = torch.frombuffer(content, dtype=_TORCH_DTYPES[entry.dtype]).view(entry.shape)
        tensor = (stored.to(torch.float32) * scale).to(self._dtype)
        if not torch.isfinite(tensor).all():
            raise AdapterLoadFailed(f"{entry.name} has values that are not finite as {self._dtype}")
        return tensor
