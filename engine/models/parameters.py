"""The decoder's parameters as data: name, shape, and the checkpoint tensors (Hugging Face names) stacked to make each.

Invariant: fused rows are ordered q, k, v and gate, up; every tensor that a checkpoint may contain is named here. Free of
torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loraplex.engine.models.architectures import ARCHITECTURES
from loraplex.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint: [rows, columns], or [rows] when `columns` is None."""

    source: str
    rows: int
    columns: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows,) if self.columns is None else (self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the decoder: its parts stacked along the rows."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.rows for part in self.parts), *self.parts[0].shape[1:])


def decoder_parameters(config: ModelConfig) -> Iterator[Parameter]:
    """All parameters, layer after layer. With tied embeddings there is no `lm_head`: it is `embed_tokens`."""
    hidden_size = config.hidden_size
    yield Parameter("embed_tokens", (Part("model.embed_tokens.weight", config.vocab_size, hidden_size),))
    for layer in range(config.num_layers):
        yield from _layer_parameters(config, layer)
    yield Parameter("norm", (Part("model.norm.weight", hidden_size),))
    if not config.tie_word_embeddings:
        yield Parameter("lm_head", (Part("lm_head.weight", config.vocab_size, hidden_size),))


def checkpoint_modules(config: ModelConfig) -> Iterator[str]:
    """Names of the modules that own the checkpoint's tensors, without .weight or .bias."""
    for parameter in decoder_parameters(config):
        for part in parameter.parts:
            yield part.source.rpartition(".")[0]


def _layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    source, name = f"model.layers.{layer}.", f"layers.{layer}."
    yield Parameter(name + "input_norm", (Part(source + "input_layernorm.weight", config.hidden_size),))
    yield from _linear(
        config, source + "self_attn.", ("q_proj", "k_proj", "v_proj"), name + "qkv", config.qkv_bias
    )
    if config.qk_norm:
        yield Parameter(name + "q_norm", (Part(source + "self_attn.q_norm.weight", config.head_dim),))
        yield Parameter(name + "k_norm", (Part(source + "self_attn.k_norm.weight", config.head_dim),))
    yield from _linear(config, source + "self_attn.", ("o_proj",), name + "o", config.o_bias)
    yield Parameter(
        name + "post_norm", (Part(source + "post_attention_layernorm.weight", config.hidden_size),)
    )
    yield from _linear(config, source + "mlp.", ("gate_proj", "up_proj"), name + "gate_up", config.mlp_bias)
    yield from _linear(config, source + "mlp.", ("down_proj",), name + "down", config.mlp_bias)


_FUSED_SOURCES = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}


def _linear(
    config: ModelConfig, source: str, projections: tuple[str, ...], name: str, bias: bool
) -> Iterator[Parameter]:
    shapes = config.projection_shapes()
    rows = {projection: shapes[projection][0] for projection in projections}
    columns = shapes[projections[0]][1]
    if ARCHITECTURES[config.architecture].fused and projections in _FUSED_SOURCES:
        rows = {_FUSED_SOURCES[projections]: sum(rows.values())}
    yield Parameter(name, tuple(Part(f"{source}{key}.weight", size, columns) for key, size in rows.items()))
    if bias:
        yield Parameter(
            name + "_bias", tuple(Part(f"{source}{key}.bias", size) for key, size in rows.items())
        )
