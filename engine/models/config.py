"""`ModelConfig`: the geometry of one decoder of the Llama family, free of torch, so that gateways can read it too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.engine.quantization.checkpoint_format import StoredWeights

SCORE_OVERHEAD = 1.4
"""What scoring a position takes, as a multiple of its product with the head. The rest is log-softmax, rank and top-k.

Measured on a CPU with a hidden size of 576 and a vocabulary of 49,152. On a GPU it is an estimate: at a hidden size of 4,096 the
product is cheaper there, and the rest costs memory bandwidth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Normalised from a `transformers` configuration. Per-layer tuples have `num_layers` entries.

    `hf_config` is config.json as it was read; `rope_tables` passes it to `transformers` for the frequencies. The three
    multipliers are 1.0 except for Granite; `attention_scale` is head_dim ** -0.5 elsewhere. A window of w lets a token see
    itself and the w - 1 tokens before it. `compression`: which weights the checkpoint stores quantized.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    uses_rope: tuple[bool, ...]
    sliding_window: tuple[int | None, ...]
    attention_scale: float
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    hf_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    compression: StoredWeights | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def score_cost(self) -> float:
        """What scoring a position costs, in tokens that are computed without the head."""
        layer = sum(out * inputs for out, inputs in self.projection_shapes().values())
        return SCORE_OVERHEAD * self.vocab_size * self.hidden_size / (layer * self.num_layers)

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of each of the seven projections of a layer."""
        return {
            "q_proj": (self.q_size, self.hidden_size),
            "k_proj": (self.kv_size, self.hidden_size),
            "v_proj": (self.kv_size, self.hidden_size),
            "o_proj": (self.hidden_size, self.q_size),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
