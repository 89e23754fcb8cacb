"""The modules of a base model that an adapter may change: PEFT's path, the engine's name and the shapes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model for which uploads are validated. `modules` are those of `adaptable_modules`.

    `vocabulary_sha256`: SHA-256 of the embedding and the head cast to bfloat16, by path; without an entry no copy can be
    compared. `names`: names under which the model is known, of which `base_model_name_or_path` should be one.
    """

    modules: Mapping[str, AdaptableModule]
    digest: str
    vocabulary_sha256: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is known to be the head too."""
        return len(self.vocabulary_sha256) == 2 and len(set(self.vocabulary_sha256.values())) == 1

    def is_named(self, name: str) -> bool:
        """Return whether the name is one of `names`, whatever its folder or hub organisation."""
        return _last_part(name) in {_last_part(each) for each in self.names}


def _last_part(name: str) -> str:
    """The model's name in lower case, without the suffixes that loaders of 4-bit copies add."""
    part = name.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()
    return part.removesuffix(".gguf").removesuffix("-bnb-4bit").removesuffix("-unsloth")


def max_weights_bytes(modules: Collection[AdaptableModule], max_rank: int, max_header_bytes: int) -> int:
    """The largest weights file of any adapter: all modules at `max_rank` in float32, and copies of embedding and head."""
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
