"""Configurations: equal to what `transformers` makes of the same file, refusals by name, and no torch in the process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.checkpoints.config_reader import load_model_config, normalise_config
from loraplex.engine.errors import ModelError, UnsupportedArchitecture
from loraplex.engine.models.architectures import ARCHITECTURES
from loraplex.engine.models.config import ModelConfig

# All that every model states; everything else has a default.
STATED: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_absent_fields_mean_what_transformers_assumes(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = stated(name)
    config = normalise_config(values)
    theirs = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 2048 // 32)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.sliding_window == windows_of(theirs)
    assert config.uses_rope == tuple(bool(rope) for rope in getattr(theirs, "no_rope_layers", [1] * 8))
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    if not isinstance(ARCHITECTURES[name].qkv_bias, bool):
        assert config.qkv_bias == theirs.attention_bias
        assert config.o_bias == getattr(theirs, "attention_out_bias", theirs.attention_bias)
        assert config.mlp_bias == getattr(theirs, "mlp_bias", False)
    if name == "GraniteForCausalLM":
        assert config.attention_scale == theirs.attention_multiplier


def windows_of(theirs: Any) -> tuple[int | None, ...]:
    window = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None)
    return tuple(None if kinds and kinds[layer] == "full_attention" else window for layer in range(8))


def test_qwen_window_starts_at_max_window_layers() -> None:
    config = changed("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=16, max_window_layers=6)
    assert config.sliding_window == (None,) * 6 + (16, 16)
    assert changed("Qwen2ForCausalLM", sliding_window=16).sliding_window == (None,) * 8


def test_end_of_sequence_ids_come_from_both_files() -> None:
    values = stated("LlamaForCausalLM") | {"eos_token_id": 5}
    assert normalise_config(values, {"eos_token_id": [7, 5, 9]}).eos_token_ids == (7, 5, 9)


def test_null_key_value_heads_mean_one_per_head() -> None:
    assert changed("Qwen2ForCausalLM", num_key_value_heads=None).num_kv_heads == 32


def test_llama_2_without_the_newer_fields_loads() -> None:
    config = changed("LlamaForCausalLM", rope_scaling=None, pretraining_tp=2, torch_dtype="float16")
    assert (config.num_kv_heads, config.head_dim) == (32, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' must be 'silu', got 'gelu'"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method' must be 'compressed-tensors', got 'awq'",
        ),
        ({"quantization_config": []}, "quant_method' must be 'compressed-tensors', got None"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "'auto_map' asks to run code"),
        ({"num_hidden_layers": "8"}, "'num_hidden_layers' must be an integer from 1 to 1024, got '8'"),
        ({"num_hidden_layers": 1025}, "'num_hidden_layers' must be an integer from 1 to 1024, got 1025"),
        ({"vocab_size": True}, "'vocab_size' must be an integer"),
        ({"vocab_size": 1 << 40}, "'vocab_size' must be an integer"),
        ({"hidden_size": None}, "'hidden_size' must be an integer"),
        ({"hidden_size": 2047}, "'hidden_size' 2047 must be a multiple of 'num_attention_heads' 32"),
        (
            {"num_key_value_heads": 5},
            "'num_attention_heads' 32 must be a multiple of 'num_key_value_heads' 5",
        ),
        ({"head_dim": 63}, "'head_dim' must be even, got 63"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a finite number above 0"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"eos_token_id": [1, "2"]}, "'eos_token_id' must be a token id or a list"),
        ({"is_encoder_decoder": True}, "'is_encoder_decoder' must be false"),
    ],
)
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        changed("LlamaForCausalLM", **changes)
    assert message in str(caught.value)


def test_bad_layer_lists_are_named() -> None:
    with pytest.raises(ModelError, match="'layer_types' must be a list of 'full_attention'"):
        changed("MinistralForCausalLM", layer_types=["chunked_attention"] * 8)
    with pytest.raises(ModelError, match="'no_rope_layers' must be a list of at least 8 entries"):
        changed("SmolLM3ForCausalLM", no_rope_layers=[1, 0])


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"},
        {"architectures": [], "model_type": "llama"},
        {"architectures": [["LlamaForCausalLM"]], "model_type": "llama"},
        {},
    ],
)
def test_an_unsupported_architecture_lists_the_supported_ones(values: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedArchitecture, match=r"supported: .*LlamaForCausalLM \(llama\).*Qwen3ForCausalLM"
    ):
        normalise_config(values)


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b"\xff\xfe{}"])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json: "):
        load_model_config(str(tmp_path))


def test_directory_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        load_model_config(str(tmp_path))


def test_gateways_read_a_model_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated("LlamaForCausalLM")))
    (tmp_path / "model.safetensors").write_bytes(b"any")
    program = (
        "import sys\n"
        "from loraplex.engine.checkpoints.config_reader import load_model_config\n"
        "from loraplex.engine.checkpoints.digest import model_digest\n"
        "load_model_config(sys.argv[1]); model_digest(sys.argv[1])\n"
        "sys.exit(len({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False).returncode
        == 0
    )


def stated(name: str) -> dict[str, Any]:
    return STATED | {"architectures": [name], "model_type": ARCHITECTURES[name].model_type}


def changed(name: str, **changes: Any) -> ModelConfig:
    return normalise_config(stated(name) | changes)
