"""The modules of a base model that an adapter may change: PEFT's path, the engine's name and the shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported for annotations only: a validation process must not load it.
    from loraplex.engine.models.config import ModelConfig

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
FLOAT32_BYTES = 4
HEADER_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""


@dataclass(frozen=True, slots=True)
class AdaptableModule:
    """`path` as in transformers, `model.layers.0.mlp.up_proj`; `name` as in the engine, `layers.0.up_proj`.

    A is [rank, in_features], B [out_features, rank]; of the embedding, `in_features` is the vocabulary.
    """

    path: str
    name: str
    out_features: int
    in_features: int
    layer: int | None = None

    @property
    def is_embedding(self) -> bool:
        return self.name == "embed_tokens"


def max_weights_bytes(modules: Collection[AdaptableModule], max_rank: int, max_header_bytes: int) -> int:
    """The largest weights file of any adapter: all modules at `max_rank` in float32, and PEFT's copies of vocabulary rows."""
    lora = sum(max_rank * (module.in_features + module.out_features) for module in modules)
    copies = sum(module.in_features * module.out_features for module in modules if module.layer is None)
    return HEADER_LENGTH_BYTES + max_header_bytes + FLOAT32_BYTES * (lora + copies)


def adaptable_modules(model: "ModelConfig") -> Mapping[str, AdaptableModule]:
    """Map PEFT paths to the projections of every layer, the embedding and the head."""
    modules = [
        AdaptableModule("model.embed_tokens", "embed_tokens", model.hidden_size, model.vocab_size),
        AdaptableModule("lm_head", "lm_head", model.vocab_size, model.hidden_size),
    ]
    for layer in range(model.num_layers):
        for projection, (out_features, in_features) in model.projection_shapes().items():
            block = "self_attn" if projection in ATTENTION else "mlp"
            path = f"model.layers.{layer}.{block}.{projection}"
            name = f"layers.{layer}.{projection}"
            modules.append(AdaptableModule(path, name, out_features, in_features, layer))
    return {module.path: module for module in modules}
