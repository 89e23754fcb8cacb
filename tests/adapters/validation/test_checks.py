"""Adapters that PEFT wrote pass; each way of not fitting the base model is refused by name."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from loraplex.adapters.errors import PeftConfigRejected, TensorsRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.report import ValidationReport
from loraplex.adapters.storage.safe_files import open_regular
from loraplex.adapters.target_modules import BaseModel, adaptable_modules
from loraplex.adapters.validation.checks import validate_adapter
from loraplex.adapters.validation.peft_config import parse_manifest
from loraplex.engine.models.config import ModelConfig

PeftFactory = Callable[..., tuple[PeftModel, Path]]
Tensors = dict[str, torch.Tensor]
LIMITS = AdapterLimits()
LAYER = "base_model.model.model.layers.0.self_attn"
A, B = f"{LAYER}.q_proj.lora_A.weight", f"{LAYER}.q_proj.lora_B.weight"


def validate(
    folder: Path, model: ModelConfig, vocabulary: Mapping[str, str] | None = None
) -> ValidationReport:
    manifest = parse_manifest((folder / "adapter_config.json").read_bytes(), LIMITS)
    with open_regular(folder / "adapter_model.safetensors", max_bytes=LIMITS.max_weights_bytes) as weights:
        base = BaseModel(adaptable_modules(model), "b" * 64, dict(vocabulary or {}))
        return validate_adapter(weights, manifest, base, LIMITS)[0]


def rewrite(
    folder: Path, change: Callable[[Tensors], object], config: Mapping[str, Any] | None = None
) -> None:
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | dict(config or {})))


@pytest.mark.parametrize("lora", [{"r": 4, "target_modules": "all-linear"}, {"task_type": None}])
def test_an_adapter_of_peft_passes_every_check(
    model_config: ModelConfig, peft_adapter: PeftFactory, lora: dict[str, Any]
) -> None:
    """Also with PEFT's own defaults: without a task type it saves the class of the base model."""
    _, folder = peft_adapter(**lora)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"] is None) == (config["auto_mapping"] is not None) == ("task_type" in lora)
    report = validate(folder, model_config)
    assert report.passed and not report.warnings
    assert [check.name for check in report.checks] == [
        "manifest",
        "header",
        "tensor_names",
        "target_modules",
        "patterns",
        "pairs",
        "shapes",
        "ranks",
        "base_copies",
        "finite",
        "effect",
    ]
    assert report.as_dicts()[0] == {
        "name": "manifest",
        "passed": True,
        "detail": "adapter_config.json describes a plain LoRA",
        "warning": False,
    }


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def fill(name: str, value: float, dtype: torch.dtype) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name][-1, -1] = value

    return change


def keep(tensors: Tensors) -> None:
    """Changes no tensor."""


P = "base_model.model."
BAD: list[tuple[str, Callable[[Tensors], object], dict[str, Any], str, str, str]] = [
    (
        "other model",
        put(f"{P}transformer.h.0.attn.lora_A.weight", 4, 16),
        {},
        "tensor_names",
        "transformer",
        "matches no",
    ),
    (
        "layer beyond",
        put(A.replace("layers.0", "layers.2"), 4, 16),
        {},
        "tensor_names",
        "layers.2",
        "matches no module",
    ),
    (
        "wrong block",
        put(A.replace("self_attn", "mlp"), 4, 16),
        {},
        "tensor_names",
        "mlp.q_proj",
        "matches no module",
    ),
    (
        "no prefix",
        put("q_proj.lora_A.weight", 4, 16),
        {},
        "tensor_names",
        "q_proj",
        "names look like base_model.model.",
    ),
    (
        "adapter name",
        put(A.replace("lora_A", "lora_A.default"), 4, 16),
        {},
        "tensor_names",
        "lora_A.weight",
        "is the same tensor as",
    ),
    ("dora", put(f"{LAYER}.q_proj.lora_magnitude_vector", 16), {}, "tensor_names", "magnitude", "DoRA"),
    ("lora bias", put(f"{LAYER}.q_proj.lora_B.bias", 16), {}, "tensor_names", "bias", "biases are not"),
    ("module bias", put(f"{LAYER}.q_proj.bias", 16), {}, "tensor_names", "bias", "biases are not"),
    ("saved head", put(f"{P}lm_head.weight", 40, 16), {}, "base_copies", "lm_head", "cannot be compared"),
    ("saved norm", put(f"{P}model.norm.weight", 16), {}, "tensor_names", "norm", "matches no module"),
    (
        "saved module",
        put(f"{P}score.modules_to_save.weight", 2),
        {},
        "tensor_names",
        "score",
        "modules_to_save",
    ),
    (
        "tokens",
        put(f"{P}model.embed_tokens.token_adapter.trainable_tokens_delta", 2),
        {},
        "tensor_names",
        "tok",
        "single",
    ),
    (
        "embedding",
        put(f"{P}model.embed_tokens.lora_A.weight", 4, 40),
        {},
        "tensor_names",
        "embed",
        "lora_embedding_A",
    ),
    (
        "linear copy",
        put(f"{LAYER}.q_proj.base_layer.weight", 16, 16),
        {},
        "tensor_names",
        "base_layer",
        "matches no",
    ),
    (
        "untargeted",
        put(A.replace("q_proj", "k_proj"), 4, 16),
        {},
        "target_modules",
        "k_proj",
        "does not name it",
    ),
    ("no A", drop(A), {}, "pairs", "layers.0.self_attn.q_proj", "lora_A is missing"),
    ("no B", drop(B), {}, "pairs", "layers.0.self_attn.q_proj", "lora_B is missing"),
    ("width of A", put(A, 4, 15), {}, "shapes", A, "[rank, 16], not [4, 15]"),
    ("height of B", put(B, 17, 4), {}, "shapes", B, "[16, rank], not [17, 4]"),
    ("vector", put(A, 64), {}, "shapes", A, "not [64]"),
    ("three axes", put(A, 4, 16, 1), {}, "shapes", A, "not [4, 16, 1]"),
    ("rank of A", put(A, 5, 16), {}, "ranks", A, "rank 5, adapter_config.json says 4"),
    ("rank of B", put(B, 16, 3), {}, "ranks", B, "rank 3, adapter_config.json says 4"),
    ("rank by config", keep, {"r": 8}, "ranks", "q_proj", "rank 4, adapter_config.json says 8"),
    (
        "rank by pattern",
        keep,
        {"rank_pattern": {"layers.0.self_attn.q_proj": 2}},
        "ranks",
        "layers.0",
        "says 2",
    ),
    (
        "lone copy",
        put(f"{P}lm_head.base_layer.weight", 40, 16),
        {},
        "base_copies",
        "lm_head",
        "cannot be compared",
    ),
    ("nan", fill(B, float("nan"), torch.float32), {}, "finite", B, "1 values that are NaN or infinite"),
    ("inf", fill(A, float("inf"), torch.float16), {}, "finite", A, "1 values that are NaN or infinite"),
    (
        "-inf bf16",
        fill(A, float("-inf"), torch.bfloat16),
        {},
        "finite",
        A,
        "1 values that are NaN or infinite",
    ),
]


@pytest.mark.parametrize(
    ("change", "config", "check", "subject", "message"), [pytest.param(*case[1:], id=case[0]) for case in BAD]
)
def test_what_does_not_fit_is_refused_by_name(
    model_config: ModelConfig,
    peft_adapter: PeftFactory,
    change: Callable[[Tensors], object],
    config: dict[str, Any],
    check: str,
    subject: str,
    message: str,
) -> None:
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    rewrite(folder, change, config)
    with pytest.raises(TensorsRejected) as caught:
        validate(folder, model_config)
    assert caught.value.check == check
    assert subject in caught.value.subject and message in caught.value.message
    last = caught.value.report.checks[-1]
    assert (last.name, last.passed) == (check, False) and not caught.value.report.passed


def test_the_largest_finite_values_pass(model_config: ModelConfig, peft_adapter: PeftFactory) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        _, folder = peft_adapter(r=4, target_modules=["q_proj"])
        rewrite(folder, fill(A, torch.finfo(dtype).min, dtype))
        assert validate(folder, model_config).passed


def test_an_adapter_without_effect_is_warned_about(
    model_config: ModelConfig, peft_adapter: PeftFactory
) -> None:
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    rewrite(folder, lambda tensors: [t.fill_(-0.0) for name, t in tensors.items() if "lora_B" in name])
    report = validate(folder, model_config)
    assert report.passed
    assert report.warnings == ("in every module A, B or alpha is zero: the adapter changes nothing",)


def test_copies_of_the_vocabulary_are_named_and_must_have_its_shape(
    model_config: ModelConfig, peft_adapter: PeftFactory
) -> None:
    _, folder = peft_adapter(r=4, target_modules=["embed_tokens", "lm_head"])
    report = validate(folder, model_config)
    assert report.passed and "lm_head.base_layer.weight" in report.warnings[0]
    rewrite(folder, put(f"{P}model.embed_tokens.base_layer.weight", 41, 16))
    with pytest.raises(TensorsRejected, match=r"must have the base model's shape \[40, 16\], not \[41, 16\]"):
        validate(folder, model_config)


def test_many_patterns_are_matched_quickly(model_config: ModelConfig, peft_adapter: PeftFactory) -> None:
    """4,000 keys of plain names are looked up, and never run."""
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    rewrite(folder, keep, {"rank_pattern": {f"layers.{n}.self_attn.q_proj": 4 for n in range(4000)}})
    (warning,) = validate(folder, model_config).warnings
    assert "rank_pattern.layers.2.self_attn.q_proj" in warning and "3978 more matches no" in warning


@pytest.mark.parametrize(
    ("config", "change", "warning"),
    [
        ({"target_modules": ["q_proj", "o_proj"]}, keep, "holds no tensor for o_proj"),
        ({"target_modules": ["q_proj", "c_attn"]}, keep, "holds no tensor for c_attn"),
        ({}, drop(A, B), "holds no tensor for model.layers.0.self_attn.q_proj"),
        ({"rank_pattern": {"up_proj": 2}}, keep, "rank_pattern.up_proj matches no targeted module"),
        ({"alpha_pattern": {"^q_proj": 2}}, keep, "alpha_pattern.^q_proj matches no targeted module"),
    ],
)
def test_what_changes_nothing_is_warned_about(
    model_config: ModelConfig,
    peft_adapter: PeftFactory,
    config: dict[str, Any],
    change: Callable[[Tensors], object],
    warning: str,
) -> None:
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    rewrite(folder, change, config)
    report = validate(folder, model_config)
    assert report.passed and [warning in found for found in report.warnings] == [True]


@pytest.mark.parametrize("names", [{"a": "b"}, ["a"], "a", {A: 1}, {A: B}])
def test_a_table_of_names_that_is_not_of_the_file_is_refused(
    model_config: ModelConfig, peft_adapter: PeftFactory, names: object
) -> None:
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    rewrite(folder, keep, {"tensor_names": names})
    with pytest.raises(PeftConfigRejected, match="tensor_names: is not of these tensors"):
        validate(folder, model_config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_is_compared_as_bfloat16(
    model_config: ModelConfig, peft_adapter: PeftFactory, dtype: torch.dtype
) -> None:
    """Rounded as torch rounds, ties too; one other value is another copy."""
    _, folder = peft_adapter(r=4, target_modules=["q_proj"])
    values = torch.randn(40, 16).to(torch.bfloat16 if dtype == torch.float16 else torch.float32)
    values[0, :2] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    copy = values.to(dtype)
    rounded = copy.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    vocabulary = {"lm_head": hashlib.sha256(rounded).hexdigest()}
    rewrite(folder, lambda tensors: tensors.update({f"{P}lm_head.weight": copy}))
    report = validate(folder, model_config, vocabulary)
    assert report.passed and not report.warnings
    (found,) = [check.detail for check in report.checks if check.name == "base_copies"]
    assert f"{copy.numel() * copy.element_size()} bytes equal the base model's own" in found
    rewrite(folder, lambda tensors: tensors[f"{P}lm_head.weight"][3, 3].add_(1))
    with pytest.raises(TensorsRejected, match="lm_head.weight: differs from the base model's own"):
        validate(folder, model_config, vocabulary)
