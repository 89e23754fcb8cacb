"""Checkpoints: sharded equals single, GGUF equals the model it was written from, damaged files are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.model_files import INDEX_FILE
from loraplex.engine.checkpoints.reader import SafetensorsCheckpoint, open_checkpoint
from loraplex.engine.checkpoints.vocabulary_digests import vocabulary_digests
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.errors import ModelError, UnsupportedArchitecture
from loraplex.engine.models.rope import rope_tables


class Tiny(Protocol):
    path: Path
    reference: Any


def load(path: Path) -> dict[str, Tensor]:
    config = load_model_config(str(path))
    state = decoder_state(config, open_checkpoint(str(path), config), torch.float32)
    return {name: state.take_tensor(name) for name in list(state)}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=tolerance, rtol=tolerance, msg=name)


def test_sharded_equals_single(llama_model: Tiny, tmp_path: Path) -> None:
    llama_model.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path), load(llama_model.path))


def test_tensor_absent_from_its_shard_is_named(llama_model: Tiny, tmp_path: Path) -> None:
    llama_model.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    shards = index["weight_map"]
    shards["model.norm.weight"] = next(
        name for name in shards.values() if name != shards["model.norm.weight"]
    )
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' is not in shard"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}extra"])
def test_damaged_safetensors_are_named(llama_model: Tiny, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes((llama_model.path / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load(tmp_path)


def test_a_tensor_of_a_type_that_torch_lacks_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(ModelError, match=r"model.safetensors: tensor 'a' cannot be read: .*F6_E2M3"):
        SafetensorsCheckpoint(tmp_path).get("a")


@pytest.mark.parametrize("case", ["llama", "llama-wide-head", "qwen2-tied", "qwen3"])
def test_gguf_equals_the_model_it_was_written_from(
    tiny: Callable[[str], Tiny], tmp_path: Path, case: str
) -> None:
    original = tiny(case)
    path = write_gguf(tmp_path, original)
    assert_same(load(path), load(original.path))
    ours, theirs = load_model_config(str(path)), load_model_config(str(original.path))
    assert (ours.head_dim, ours.num_kv_heads, ours.eos_token_ids) == (
        theirs.head_dim,
        theirs.num_kv_heads,
        (2,),
    )
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    torch.testing.assert_close(rope_tables(ours, 200), rope_tables(theirs, 200))


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("Q8_0", 2e-2)])
def test_half_and_block_quantized_gguf(
    tiny: Callable[[str], Tiny], tmp_path: Path, kind: str, tolerance: float
) -> None:
    original = tiny("llama")
    path = write_gguf(tmp_path, original, kind=gguf.GGMLQuantizationType[kind])
    assert_same(load(path), load(original.path), tolerance)
    config = load_model_config(str(path))
    exact = open_checkpoint(str(path), config).is_exact("model.embed_tokens.weight")
    assert (
        exact
        == (kind == "F16")
        == bool(vocabulary_digests(str(path), config, open_checkpoint(str(path), config)))
    )


def test_gguf_frequency_factors_of_llama_3_are_applied(tiny: Callable[[str], Tiny], tmp_path: Path) -> None:
    original = tiny("llama-llama3")
    theirs = rope_tables(load_model_config(str(original.path)), 200)
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = plain / original.reference.model.rotary_emb.inv_freq
    path = write_gguf(tmp_path, original, factors=factors.numpy().astype(np.float32), theta=500000.0)
    torch.testing.assert_close(rope_tables(load_model_config(str(path)), 200), theirs, atol=1e-5, rtol=0)
    assert_same(load(path), load(original.path))


def test_unsupported_gguf_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    finish(writer)
    with pytest.raises(
        UnsupportedArchitecture, match="GGUF architecture 'mamba' is not supported; supported: llama"
    ):
        load_model_config(str(tmp_path / "model.gguf"))


def test_gguf_rope_scaling_is_refused_rather_than_dropped(llama_model: Tiny, tmp_path: Path) -> None:
    path = write_gguf(tmp_path, llama_model, scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(
        ModelError, match=r"'llama\.rope\.scaling\.type' must be 'none' or 'linear', got 'yarn'"
    ):
        load_model_config(str(path))


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 16, b"\x00" * 64]
)
def test_damaged_gguf_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf: not a readable GGUF file"):
        load_model_config(str(tmp_path / "model.gguf"))


def write_gguf(
    folder: Path,
    tiny: Tiny,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    factors: Any = None,
    theta: float = 10000.0,
    scaling: gguf.RopeScalingType | None = None,
) -> Path:
    """The model as llama.cpp's converter writes it; norms and biases stay F32."""
    config = tiny.reference.config
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_eos_token_id(2)
    if config.model_type != "qwen2":
        writer.add_key_length(config.head_dim)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, values in gguf_tensors(tiny):
        quantized = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, quantized), raw_dtype=quantized)
    finish(writer)
    return path


def gguf_tensors(tiny: Tiny) -> list[tuple[str, Any]]:
    config = tiny.reference.config
    architecture = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}[config.model_type]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = []
    for name, tensor in tiny.reference.state_dict().items():
        module, _, suffix = name.rpartition(".")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type == "llama" and (own := heads.get(module.split(".")[-1])):
            # Rows (head, half, pair) -> (head, pair, half), as llama.cpp rotates adjacent values.
            values = np.ascontiguousarray(
                values.reshape(own, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            )
        tensors.append((f"{table.get_name(module)}.{suffix}", values))
    return tensors


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
