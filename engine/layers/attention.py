"""The attention of one layer: projections with their adapters, positions, KV write, paged attention."""

import torch

from loraplex.engine.batch.forward_batch import ForwardBatch
from loraplex.engine.kernels.paged_attention import decode_attention, prefill_attention
from loraplex.engine.kernels.rotary import rotary_write_kv
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.lora.device_batch import PendingDelta


class Attention:
    """Grouped-query attention (Ainslie et al. 2023), optionally with q/k norm, without positions, or windowed."""

    def __init__(
        self,
        qkv: LoraLinear,
        o: LoraLinear,
        *,
        q_size: int,
        scale: float,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        window: int | None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """`kv_scales`: divisors of K and V in a cache of 8 bits."""
        self._qkv = qkv
        self._o = o
        self._q_size = q_size
        self._scale = scale
        self._rope = rope
        self._norms = norms
        self._epsilon = epsilon
        self._window = window
        self._kv_scales = kv_scales

    def __call__(
        self, x: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, PendingDelta | None]:
        """x [tokens, hidden] -> [tokens, hidden], and the delta still to be added to it; writes K and V into `kv_cache`."""
        qkv, delta = self._qkv.deferred(x, batch.lora)
        kv_scales = self._kv_scales
        rotary_write_kv(
            qkv,
            kv_cache,
            batch.positions,
            batch.slots,
            self._rope,
            self._norms,
            self._epsilon,
            kv_scales,
            delta,
        )
        attended = qkv.new_empty(qkv.shape[0], self._q_size)
        decodes = batch.num_decodes
        if decodes:
            decode_attention(
                qkv[:decodes],
                attended[:decodes],
                kv_cache,
                batch.decode_tables,
                batch.decode_lengths,
                self._scale,
                self._window,
                kv_scales,
            )
        if batch.chunks is not None:
            prefill_attention(qkv, attended, kv_cache, batch.chunks, self._scale, self._window, kv_scales)
        return self._o.deferred(attended, batch.lora)
