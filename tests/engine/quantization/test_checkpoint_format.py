"""Which modules a configuration matches: the same as the oracle, and in bounded time."""

import time

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.errors import ModelError
from loraplex.engine.quantization import checkpoint_format
from loraplex.engine.quantization.checkpoint_format import (
    EMBEDDING,
    LINEAR,
    MAX_PATTERNS,
    Sharing,
    StoredWeight,
    StoredWeights,
)

NAMES = (
    "Linear",
    "lm_head",
    "model.layers.1.mlp.down_proj",
    "down_proj",
    "re:.*down_proj",
    "re:.*[qkv]_proj$",
    r"re:model\.layers\.0\.",
    "re:layers",
    "re:lm_head|.*gate_proj",
    "re:^model.*1.*(?<!o)_proj",
)


def weight_of(group_size: int) -> StoredWeight:
    """Told apart by the group size alone."""
    return StoredWeight(4, False, True, Sharing.GROUP, group_size, True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), min_size=1, max_size=3),
    ignored=st.lists(st.sampled_from(NAMES), max_size=2),
)
def test_modules_are_matched_as_the_oracle_does(
    model: LlamaForCausalLM, groups: list[list[str]], ignored: list[str]
) -> None:
    sizes = [8 * 2**index for index in range(len(groups))]
    targets = {name: weight_of(size) for names, size in zip(groups, sizes, strict=True) for name in names}
    modules = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    ours = StoredWeights(targets, tuple(ignored)).of(modules.items())
    assert {name: weight.group_size for name, weight in ours.items()} == oracle(model, groups, sizes, ignored)


def oracle(
    model: LlamaForCausalLM, groups: list[list[str]], sizes: list[int], ignored: list[str]
) -> dict[str, int]:
    schemes = {
        f"group_{index}": {
            "targets": names,
            "weights": {"num_bits": 4, "strategy": "group", "group_size": size},
        }
        for index, (names, size) in enumerate(zip(groups, sizes, strict=True))
    }
    config = QuantizationConfig(
        config_groups=schemes, ignore=ignored, quantization_status=QuantizationStatus.COMPRESSED
    )
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            del module.quantization_scheme
    apply_quantization_config(model, config, show_progress=False)
    return {
        name: module.quantization_scheme.weights.group_size
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }


def test_a_class_is_matched_last() -> None:
    stored = StoredWeights(
        {"Linear": weight_of(32), "re:.*head": weight_of(64), "Embedding": weight_of(128)}, ()
    )
    found = stored.of([("lm_head", LINEAR), ("model.o", LINEAR), ("model.embed_tokens", EMBEDDING)])
    assert [weight.group_size for weight in found.values()] == [64, 32, 128]


def test_a_pattern_that_never_ends_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_format, "MATCHING_TIMEOUT_S", 0.2)
    hostile = StoredWeights({"Linear": weight_of(32)}, ("re:((a|.)(.|e))*(.|..)*[AX]$",))
    begin = time.monotonic()
    with pytest.raises(ModelError, match="takes longer than 0.2 s"):
        hostile.of((f"model.layers.{index}.self_attn.q_proj", LINEAR) for index in range(100))
    assert time.monotonic() - begin < 20


def test_short_matches_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes less than a millisecond, all of them half a minute."""
    monkeypatch.setattr(checkpoint_format, "MATCHING_TIMEOUT_S", 0.2)
    slow = tuple(f"re:(?:(?:.|.)){{11}}[AX](?#{index})" for index in range(MAX_PATTERNS))
    hostile = StoredWeights({"Linear": weight_of(32)}, slow)
    begin = time.monotonic()
    with pytest.raises(ModelError, match="takes longer than 0.2 s"):
        hostile.of((f"model.layers.{index}.self_attn.q_proj", LINEAR) for index in range(1000))
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (("re:(",), r"'\(' is not a valid pattern"),
        (("re:" + "a" * 1025,), "a pattern of 1025 characters; 1024 are allowed"),
        (tuple(f"re:{index}" for index in range(MAX_PATTERNS + 1)), "257 patterns; 256 are allowed"),
    ],
    ids=["syntax", "length", "number"],
)
def test_patterns_are_bounded(ignored: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        StoredWeights({}, ignored)
