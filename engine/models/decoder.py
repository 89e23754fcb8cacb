"""The decoder of the Llama family (Touvron et al. 2023), driven by `ModelConfig` alone: no branch per model.

Invariant: `forward` computes every token of the batch, writes its K and V, and returns logits of the sampled rows only.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import ForwardBatch
from loraplex.engine.kernels.paged_attention import decode_tiling
from loraplex.engine.kernels.rms_norm import rms_norm
from loraplex.engine.kernels.sgmv import expand
from loraplex.engine.layers.attention import Attention
from loraplex.engine.layers.base_linear import BaseLinear
from loraplex.engine.layers.embedding import Embedding
from loraplex.engine.layers.linear import make_linear
from loraplex.engine.layers.lora_linear import LoraLinear
from loraplex.engine.layers.mlp import MLP
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import PendingDelta
from loraplex.engine.lora.site import LoraSite, make_site
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder_state import DecoderState
from loraplex.engine.models.rope import rope_tables
from loraplex.engine.quantization.quantized_weight import QuantizedWeight

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
    mlp: MLP


class Decoder:
    """Weights, layers and the sites where adapters act.

    `sites` holds every site once, for the adapter pool; `projections` every projection but the head by its parameter's name.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: DecoderState,
        max_model_len: int,
        *,
        deterministic: bool = False,
    ) -> None:
        """`state` is what `decoder_state` returns; it is emptied, so that each weight can be freed once it is packed.

        `deterministic`: no projection's sums depend on the number of rows.
        """
        self.config = config
        self._deterministic = deterministic
        self.sites: list[LoraSite] = []
        self.projections: dict[str, LoraLinear] = {}
        embed = state.take_tensor("embed_tokens")
        self.device, self.dtype = embed.device, embed.dtype
        embed_site = self._site(("embed_tokens",), config.vocab_size, (config.hidden_size,))
        self._embed = Embedding(embed, embed_site, config.embedding_multiplier)
        rope = tuple(table.to(self.device).contiguous() for table in rope_tables(config, max_model_len))
        self._layers = [self._layer(i, state, (rope[0], rope[1])) for i in range(config.num_layers)]
        self._norm = state.take_tensor("norm")
        head_site = self._site(("lm_head",), config.hidden_size, (config.vocab_size,))
        self._head = LoraLinear(self._base_linear(state.take_weight("lm_head"), None), head_site)
        bases = (projection.base for projection in (*self.projections.values(), self._head))
        self._layouts = tuple({base.layout: base for base in bases}.values())

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: list[Tensor],
        keep: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Logits [sampled rows, vocab] in the model's type. `kv_cache` has one tensor per layer.

        `keep` is called with what `head` takes, of all tokens. It copies what it needs: the logits overwrite them.
        """
        epsilon = self.config.rms_norm_eps
        residual: Tensor | None = None
        delta: PendingDelta | None = None
        hidden = self._embed(batch.token_ids, batch.lora)
        for layer, cache in zip(self._layers, kv_cache, strict=True):
            if residual is None:
                residual, normal = hidden, rms_norm(hidden, None, layer.input_norm, epsilon)
            else:
                normal = self._normal(hidden, delta, residual, layer.input_norm)
            hidden, delta = layer.attention(normal, cache, batch)
            normal = self._normal(hidden, delta, residual, layer.post_norm)
            hidden, delta = layer.mlp(normal, batch.lora)
        hidden = self._whole(hidden, delta)
        if keep is not None and residual is not None:
            keep(hidden, residual)
        return self._logits(hidden, residual, batch)

    def tiling(self, rows: int) -> Hashable:
        """Return what depends on the number of rows in a step's kernels. Steps of equal values run the same machine code."""
        return (
            tuple(base.tiling(rows, self.dtype) for base in self._layouts),
            decode_tiling(rows, self.device),
        )

    def _normal(
        self, hidden: Tensor, delta: PendingDelta | None, residual: Tensor | None, weight: Tensor
    ) -> Tensor:
        if self.config.residual_multiplier != 1.0:
            hidden, delta = self._whole(hidden, delta), None
        return rms_norm(hidden, residual, weight, self.config.rms_norm_eps, delta)

    def _whole(self, hidden: Tensor, delta: PendingDelta | None) -> Tensor:
        """Return the sum that a layer adds to the residual."""
        if delta is not None:
            expand(delta.hidden, hidden, delta.site, delta.batch)
        multiplier = self.config.residual_multiplier
        return hidden if multiplier == 1.0 else hidden * multiplier

    def _logits(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> Tensor:
        if batch.sampled_tokens is not None:
            hidden = hidden.index_select(0, batch.sampled_tokens)
            residual = None if residual is None else residual.index_select(0, batch.sampled_tokens)
        if not batch.num_sampled:
            return hidden.new_empty(0, self.config.vocab_size)
        return self.head(hidden, residual, batch.sampled_lora)

    def head(self, hidden: Tensor, residual: Tensor | None, lora: LoraBatch | None) -> Tensor:
        """Logits [rows, vocab] of the last layer's output and its residual, both [rows, hidden]."""
        logits = self._head(rms_norm(hidden, residual, self._norm, self.config.rms_norm_eps), lora)
        return logits if self.config.logits_multiplier == 1.0 else logits * self.config.logits_multiplier

    def _layer(self, index: int, state: DecoderState, rope: tuple[Tensor, Tensor]) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        shapes = config.projection_shapes()
        attention = Attention(
            self._linear(prefix, "qkv", QKV, shapes, state),
            self._linear(prefix, "o", ("o_proj",), shapes, state),
            q_size=config.q_size,
            scale=config.attention_scale,
            rope=rope if config.uses_rope[index] else None,
            norms=(state.take_tensor(prefix + "q_norm"), state.take_tensor(prefix + "k_norm"))
            if config.qk_norm
            else None,
            epsilon=config.rms_norm_eps,
            window=config.sliding_window[index],
        )
        mlp = MLP(
            self._linear(prefix, "gate_up", GATE_UP, shapes, state),
            self._linear(prefix, "down", ("down_proj",), shapes, state),
        )
        return _Layer(
            state.take_tensor(prefix + "input_norm"), attention, state.take_tensor(prefix + "post_norm"), mlp
        )

    def _linear(
        self,
        prefix: str,
        name: str,
        projections: tuple[str, ...],
        shapes: dict[str, tuple[int, int]],
        state: DecoderState,
    ) -> LoraLinear:
        base = self._base_linear(state.take_weight(prefix + name), state.take_bias(f"{prefix}{name}_bias"))
        names = tuple(prefix + projection for projection in projections)
        layer = LoraLinear(base, self._site(names, base.inputs, tuple(shapes[p][0] for p in projections)))
        self.projections[prefix + name] = layer
        return layer

    def _base_linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> BaseLinear:
        return make_linear(weight, bias, self.dtype, deterministic=self._deterministic)

    def _site(self, names: tuple[str, ...], inputs: int, slice_sizes: tuple[int, ...]) -> LoraSite:
        # Slots come with the pool, which lays out the tables of all sites as one tensor (`SlotTables`).
        site = make_site(names, inputs, slice_sizes, 0, self.device)
        self.sites.append(site)
        return site
