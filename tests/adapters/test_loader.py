"""What the engine gets equals what PEFT computes, for adapters that PEFT wrote."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from loraplex.adapters.digest import adapter_digest
from loraplex.adapters.limits import DEFAULT_LIMITS
from loraplex.adapters.loader import PeftAdapterSource
from loraplex.adapters.validation.peft_config import parse_manifest
from loraplex.engine.errors import AdapterLoadFailed
from loraplex.engine.lora.loader import AdapterSource
from loraplex.engine.lora.weights import PROJECTIONS, LoraWeights
from loraplex.engine.messages import AdapterRef
from loraplex.engine.models.config import ModelConfig

PeftFactory = Callable[..., tuple[PeftModel, Path]]
SEVEN = list(PROJECTIONS)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("seven", {"r": 4, "lora_alpha": 12, "target_modules": SEVEN}),
    ("all-linear", {"r": 8, "target_modules": "all-linear"}),
    ("attention", {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}),
    ("rank 17", {"r": 17, "target_modules": ["self_attn.k_proj", "layers.1.mlp.down_proj"]}),
    ("rslora", {"r": 4, "lora_alpha": 16, "use_rslora": True, "target_modules": SEVEN}),
    ("head", {"r": 4, "target_modules": ["q_proj", "lm_head"]}),
    ("embedding", {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens", "o_proj"]}),
    ("tied", {"r": 3, "target_modules": ["embed_tokens", "lm_head"], "tie": True}),
    (
        "patterns",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": SEVEN,
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3, "down_proj": 16},
            "alpha_pattern": {"^model.layers.1.mlp.up_proj": 32, "v_proj": 1},
        },
    ),
    (
        "patterns and rslora",
        {
            "r": 4,
            "use_rslora": True,
            "target_modules": SEVEN + ["lm_head", "embed_tokens"],
            "rank_pattern": {"lm_head": 5, "embed_tokens": 2, "mlp.gate_proj": 1},
            "alpha_pattern": {"model.embed_tokens": 9, "1.self_attn.o_proj": 2.5},
        },
    ),
    ("layers", {"r": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"], "layers_to_transform": [1]}),
    ("excluded", {"r": 2, "target_modules": SEVEN, "exclude_modules": ["layers.0.mlp.up_proj", "k_proj"]}),
]


def reference(folder: Path) -> AdapterRef:
    return AdapterRef(namespace=bytes(32), digest="0" * 64, blob_path=str(folder))


def peft_deltas(model: PeftModel) -> dict[str, torch.Tensor]:
    """By engine name, [out, in]; of the embedding [vocab, hidden]."""
    deltas = {}
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            parts = path.removeprefix("base_model.model.").removeprefix("model.").split(".")
            name = parts[0] if len(parts) == 1 else f"{parts[0]}.{parts[1]}.{parts[3]}"
            deltas[name] = module.get_delta_weight("default").detach()
    return deltas


def our_deltas(weights: LoraWeights) -> dict[str, torch.Tensor]:
    deltas = {name: module.b.float() @ module.a.float() for name, module in weights.modules.items()}
    return {name: delta.T if name == "embed_tokens" else delta for name, delta in deltas.items()}


@pytest.mark.parametrize("lora", [pytest.param(settings, id=name) for name, settings in CASES])
def test_delta_equals_that_of_peft(
    model_config: ModelConfig, peft_adapter: PeftFactory, lora: dict[str, Any]
) -> None:
    model, folder = peft_adapter(**lora)
    expected = peft_deltas(model)
    weights = PeftAdapterSource(model_config, torch.float32).load(reference(folder))
    assert weights.modules.keys() == expected.keys()
    for name, delta in our_deltas(weights).items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_every_stored_type_is_read_as_the_requested_one(
    model_config: ModelConfig, peft_adapter: PeftFactory, stored: torch.dtype, dtype: torch.dtype
) -> None:
    _, folder = peft_adapter(r=4, lora_alpha=7, target_modules=SEVEN)
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    source: AdapterSource = PeftAdapterSource(model_config, dtype)
    weights = source.load(reference(folder))
    prefix = "base_model.model.model.layers.1.mlp.up_proj.lora"
    module = weights.modules["layers.1.up_proj"]
    assert module.a.dtype == module.b.dtype == dtype
    assert module.a.is_contiguous() and module.b.is_contiguous()
    assert torch.equal(module.a, tensors[f"{prefix}_A.weight"].to(dtype))
    assert torch.equal(module.b, (tensors[f"{prefix}_B.weight"].float() * (7 / 4)).to(dtype))


def test_an_overflow_in_the_requested_type_is_an_error(
    model_config: ModelConfig, peft_adapter: PeftFactory
) -> None:
    _, folder = peft_adapter(r=1, lora_alpha=900_000, target_modules=["q_proj"])
    weights = PeftAdapterSource(model_config, torch.bfloat16).load(reference(folder))
    assert {module.rank for module in weights.modules.values()} == {1}
    with pytest.raises(
        AdapterLoadFailed, match="lora_B.weight has values that are not finite as torch.float16"
    ):
        PeftAdapterSource(model_config, torch.float16).load(reference(folder))


def test_a_damaged_blob_fails_to_load(model_config: ModelConfig, peft_adapter: PeftFactory) -> None:
    source = PeftAdapterSource(model_config, torch.float32)
    _, folder = peft_adapter(r=2, target_modules=["q_proj"])
    _, other = peft_adapter("other", r=3, target_modules=["q_proj"])
    shutil.copy(other / "adapter_model.safetensors", folder)
    with pytest.raises(AdapterLoadFailed, match="has the rank 3, adapter_config.json says 2"):
        source.load(reference(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(
        tensors | {name.replace(".weight", ".default.weight"): tensors[name].clone()},
        folder / "adapter_model.safetensors",
    )
    with pytest.raises(AdapterLoadFailed, match="default.weight: matches no module"):
        source.load(reference(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"\x08")
    with pytest.raises(AdapterLoadFailed, match="too few"):
        source.load(reference(folder))
    shutil.rmtree(folder)
    with pytest.raises(AdapterLoadFailed, match="adapter_config.json: is missing"):
        source.load(reference(folder))


def test_content_that_differs_from_the_digest_fails_to_load(
    model_config: ModelConfig, peft_adapter: PeftFactory
) -> None:
    _, folder = peft_adapter(r=2, target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    config = parse_manifest((folder / "adapter_config.json").read_bytes(), DEFAULT_LIMITS).canonical()
    (folder / "adapter_config.json").write_bytes(config)
    digest = adapter_digest(config, hashlib.sha256(file.read_bytes()).digest(), "b" * 64)
    stored = AdapterRef(namespace=bytes(32), digest=digest, blob_path=str(folder))
    source = PeftAdapterSource(model_config, torch.float32, "b" * 64)
    assert source.load(stored).digest == digest
    with pytest.raises(AdapterLoadFailed, match="base model is another"):
        PeftAdapterSource(model_config, torch.float32, "c" * 64).load(stored)
    tensors = load_file(file)
    tensors[next(iter(tensors))][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(AdapterLoadFailed, match="content has changed"):
        source.load(stored)
