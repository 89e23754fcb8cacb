"""Configuration, rope tables and stacked weights together: a dense forward pass over them must equal `transformers`.

The forward pass here is a second implementation of ModelConfig, without the engine's decoder, caches or kernels.
"""

from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.errors import ModelError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.rope import rope_tables

State = dict[str, Tensor]


class Tiny(Protocol):
    path: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> Tensor: ...


def test_dense_forward_equals_transformers(tiny_model: Tiny, prompt: list[int]) -> None:
    config = load_model_config(str(tiny_model.path))
    state = load_state(tiny_model.path)
    logits = dense_logits(config, state, prompt)
    torch.testing.assert_close(logits, tiny_model.logits(prompt), atol=1e-4, rtol=1e-4)


def test_state_has_the_documented_names_and_shapes(tiny_model: Tiny) -> None:
    config = load_model_config(str(tiny_model.path))
    state = load_state(tiny_model.path)
    expected = {"embed_tokens", "norm", "lm_head"}
    for layer in range(config.num_layers):
        names = ["input_norm", "qkv", "o", "post_norm", "gate_up", "down"]
        names += ["q_norm", "k_norm"] * config.qk_norm + ["qkv_bias"] * config.qkv_bias
        names += ["o_bias"] * config.o_bias + ["gate_up_bias", "down_bias"] * config.mlp_bias
        expected |= {f"layers.{layer}.{name}" for name in names}
    assert set(state) == expected
    assert state["layers.0.qkv"].shape == (config.q_size + 2 * config.kv_size, config.hidden_size)
    assert state["layers.0.gate_up"].shape == (2 * config.intermediate_size, config.hidden_size)
    assert state["layers.0.o"].shape == (config.hidden_size, config.q_size)
    assert (state["lm_head"] is state["embed_tokens"]) == config.tie_word_embeddings


def test_state_is_cast_and_independent_of_the_file(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(llama_model, tmp_path)
    state = load_state(model, torch.bfloat16)
    before = state["norm"].clone()
    (model / "model.safetensors").write_bytes(b"")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert torch.equal(state["norm"], before)


def test_missing_tensor_is_named(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(llama_model, tmp_path, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(
        ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM"
    ):
        load_state(model)


def test_unexpected_tensor_is_named(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(llama_model, tmp_path, add={"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_state(model)


def test_derived_tensors_are_ignored(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(
        llama_model, tmp_path, add={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    )
    assert "norm" in load_state(model)


def test_misshapen_tensor_is_named_with_both_shapes(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(llama_model, tmp_path, add={"model.norm.weight": torch.ones(63)})
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' must have shape \(64,\), got \(63,\)"):
        load_state(model)


def test_integer_weights_are_refused(llama_model: Tiny, tmp_path: Path) -> None:
    model = copied(llama_model, tmp_path, add={"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(ModelError, match="float of 16 bits or more, got torch.int8"):
        load_state(model)


def load_state(path: Path, dtype: torch.dtype = torch.float32) -> State:
    config = load_model_config(str(path))
    state = decoder_state(config, open_checkpoint(str(path), config), dtype)
    return {name: state.take_tensor(name) for name in list(state)}


def copied(tiny: Tiny, folder: Path, *, drop: str | None = None, add: State | None = None) -> Path:
    """The checkpoint again in `folder`, without the tensor `drop` and with those of `add`."""
    tensors = load_file(tiny.path / "model.safetensors") | (add or {})
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != drop}, folder / "model.safetensors"
    )
    (folder / "config.json").write_bytes((tiny.path / "config.json").read_bytes())
    return folder


def dense_logits(config: ModelConfig, state: State, token_ids: list[int]) -> Tensor:
    """fp32 [tokens, vocabulary]."""
    rope = rope_tables(config, len(token_ids))
    hidden = state["embed_tokens"][token_ids] * config.embedding_multiplier
    for layer in range(config.num_layers):
        own = {
            name.split(".", 2)[2]: value
            for name, value in state.items()
            if name.startswith(f"layers.{layer}.")
        }
        attended = attention(config, own, rms_norm(hidden, own["input_norm"], config), rope, layer)
        hidden = hidden + attended * config.residual_multiplier
        gate, up = project(own, "gate_up", rms_norm(hidden, own["post_norm"], config)).chunk(2, dim=-1)
        hidden = hidden + project(own, "down", silu(gate) * up) * config.residual_multiplier
    return linear(rms_norm(hidden, state["norm"], config), state["lm_head"]) * config.logits_multiplier


def attention(
    config: ModelConfig, own: State, hidden: Tensor, rope: tuple[Tensor, Tensor], layer: int
) -> Tensor:
    tokens, groups = len(hidden), config.num_heads // config.num_kv_heads
    qkv = project(own, "qkv", hidden).view(tokens, -1, config.head_dim)
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    query, key, value = torch.split(qkv, heads, dim=1)
    if config.qk_norm:
        query, key = rms_norm(query, own["q_norm"], config), rms_norm(key, own["k_norm"], config)
    if config.uses_rope[layer]:
        query, key = rotate(query, rope), rotate(key, rope)
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * config.attention_scale
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if (window := config.sliding_window[layer]) is not None:
        mask = mask.triu(1 - window)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return project(own, "o", torch.einsum("hqk,khd->qhd", weights, value).reshape(tokens, -1))


def rotate(heads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (table[:, None, :] for table in rope)
    half = cos.shape[-1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def project(own: State, name: str, values: Tensor) -> Tensor:
    return linear(values, own[name], own.get(name + "_bias"))


def rms_norm(values: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight
