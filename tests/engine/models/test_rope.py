"""Rope tables: equal to the rotary embedding of `transformers`, and refusals where no fixed table can be exact."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from loraplex.engine.checkpoints.config_reader import load_model_config, normalise_config
from loraplex.engine.errors import ModelError
from loraplex.engine.models import rope as rope_module
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.rope import rope_tables


class Tiny(Protocol):
    path: Path
    reference: Any


def test_tables_equal_those_of_transformers(tiny_model: Tiny) -> None:
    cos, sin = rope_tables(load_model_config(str(tiny_model.path)), 200)
    positions = torch.arange(200)[None]
    their_cos, their_sin = tiny_model.reference.model.rotary_emb(torch.zeros(1, 200, 1), positions)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(torch.cat([cos, cos], -1), their_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([sin, sin], -1), their_sin[0], atol=1e-6, rtol=0)


def test_longrope_is_fixed_by_the_longest_sequence(tiny: Callable[[str], Tiny]) -> None:
    config = load_model_config(str(tiny("phi3-longrope-long").path))
    short, long = rope_tables(config, 128)[0], rope_tables(config, 129)[0]
    assert not torch.allclose(short, long[:128])
    assert torch.equal(rope_tables(config, 256)[0][:129], long)


def test_dynamic_rope_is_refused_beyond_the_trained_length() -> None:
    config = llama({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    plain = rope_tables(llama({"rope_type": "default", "rope_theta": 1e4}), 256)
    assert torch.equal(rope_tables(config, 256)[0], plain[0])
    with pytest.raises(ModelError, match="max_model_len must be at most 256 with dynamic rope, got 257"):
        rope_tables(config, 257)


def test_configuration_is_left_as_it_was(tiny: Callable[[str], Tiny]) -> None:
    config = load_model_config(str(tiny("phi3-longrope-long").path))
    before = copy.deepcopy(config)
    rope_tables(config, 256)
    assert config == before


def test_older_spelling_is_read() -> None:
    old = llama_values() | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = llama({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert torch.equal(rope_tables(normalise_config(old), 64)[1], rope_tables(new, 64)[1])


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 500_000},
    ],
)
def test_plain_rope_needs_no_transformers(spelling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = normalise_config(llama_values() | spelling)
    with monkeypatch.context() as patched:
        patched.setattr(
            rope_module, "_transformers_configuration", lambda config: pytest.fail("it was loaded")
        )
        plain = rope_tables(config, 64)
    monkeypatch.setattr(rope_module, "_plain_rope", lambda values: None)
    for ours, theirs in zip(plain, rope_tables(config, 64), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, "rope type must be one of default, .*got 'spiral'"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "linear", "factor": 0, "rope_theta": 1e4}, "do not fit|not valid"),
        ({"rope_type": "default", "rope_theta": "wide"}, "not valid|refused"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5},
            "'partial_rotary_factor'",
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2},
            "'partial_rotary_factor'",
        ),
    ],
)
def test_bad_parameters_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_tables(llama(rope), 64)


def llama_values() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }


def llama(rope: dict[str, Any]) -> ModelConfig:
    return normalise_config(llama_values() | {"rope_parameters": rope})
