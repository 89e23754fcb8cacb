"""One adapter's tensors, normalised: per module A [rank, in] and B [out, rank] with the LoRA scale folded into B.

Names are those of the Llama family: `layers.<i>.<projection>`, `lm_head`, `embed_tokens`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """delta(x) = B @ (A @ x). For `embed_tokens`: A is [rank, vocab], B [hidden, rank]."""

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """All modules of one adapter by name, for example `layers.3.q_proj`. Ranks may differ by module."""

    digest: str
    modules: Mapping[str, LoraModule]
