"""Positions and the KV write: everything between the qkv projection and attention."""

import torch

from loraplex.engine.kernels.bodies import Body, body_for
from loraplex.engine.kernels.reference import rotary as reference


def rotary_write_kv(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """See `reference.rotary_write_kv`."""
    if body_for(qkv) is Body.COMPILED:
        from loraplex.engine.kernels.compiled import rotary as compiled

        compiled.rotary_write_kv(qkv, kv_cache, positions, slots, rope, norms, epsilon)
    else:
        reference.rotary_write_kv(qkv, kv_cache, positions, slots, rope, norms, epsilon)
