"""The paged K and V of all layers (PagedAttention, Kwon et al. 2023): one tensor per layer, K and V of a token together."""

import torch

from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig

KV_DTYPES = ("auto", "fp8")


def kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the cache's type for a model that computes in `dtype`: `auto` the same, `fp8` 8 bits (e4m3, no infinity).

    Raises `ModelError` for another name.
    """
    if name not in KV_DTYPES:
        raise ModelError(f"`kv_dtype` must be {' or '.join(KV_DTYPES)}, got {name!r}")
    return torch.float8_e4m3fn if name == "fp8" else dtype


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers; `dtype` is the cache's."""
    return 2 * config.kv_size * block_size * config.num_layers * dtype.itemsize


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Allocate per layer [num_blocks, block_size, 2, kv_heads, head_dim]. Zeroed, so that no row can read a stale NaN."""
    shape = (num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
