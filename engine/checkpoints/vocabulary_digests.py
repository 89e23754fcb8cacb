"""SHA-256 of a base model's embedding and head, by which copies of them in adapters are compared."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loraplex.engine.checkpoints.quality_manifest import recorded_vocabulary
from loraplex.engine.checkpoints.reader import Checkpoint
from loraplex.engine.models.config import ModelConfig

EMBEDDING: Final = "model.embed_tokens"
HEAD: Final = "lm_head"
_EXACT: Final = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK_ROWS: Final = 4096


def vocabulary_digests(path: str, config: ModelConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the digests by module, of the values cast to bfloat16; tied ones are equal. Quantized tensors have none.

    An artefact of `loraplex quantize` carries those of the model it was made from. Raises `ModelError`.
    """
    recorded = recorded_vocabulary(Path(path))
    if recorded is not None:
        return recorded
    sources = {EMBEDDING: f"{EMBEDDING}.weight"}
    sources[HEAD] = sources[EMBEDDING] if config.tie_word_embeddings else f"{HEAD}.weight"
    exact = {name for name in sources.values() if name in checkpoint.names() and checkpoint.is_exact(name)}
    digests = {name: _sha256(tensor) for name in exact if (tensor := checkpoint.get(name)).dtype in _EXACT}
    return {module: digests[name] for module, name in sources.items() if name in digests}


def _sha256(tensor: Tensor) -> str:
    digest = hashlib.sha256()
    for start in range(0, tensor.shape[0], _CHUNK_ROWS):
        rows = tensor[start : start + _CHUNK_ROWS]
        digest.update(rows.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
