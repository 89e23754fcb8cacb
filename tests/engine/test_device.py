"""Which types a device computes in, on this CPU and on one without instructions for 16 bits."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from loraplex.engine.config import CacheConfig, EngineConfig
from loraplex.engine.device import DTYPES, check_products, choose_dtype
from loraplex.engine.errors import ModelError
from loraplex.engine.layers.linear import Linear
from loraplex.engine.model_loading import load_model

CPU = torch.device("cpu")


@pytest.fixture
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of this CPU: whether it multiplies float16 and bfloat16."""
    for name, is_supported in zip(("fp16", "bf16"), request.param, strict=True):
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda is_supported=is_supported: is_supported
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights: what reads them fails."""
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_type_is_refused_exactly_where_this_cpu_does_not_multiply_it(dtype: torch.dtype) -> None:
    try:
        check_products(dtype, CPU)
    except ModelError:
        with pytest.raises(RuntimeError, match="fp16"):
            Linear(torch.ones(32, 32, dtype=dtype))
    else:
        product = Linear(torch.ones(32, 32, dtype=dtype))(torch.ones(3, 32, dtype=dtype))
        assert torch.equal(product, torch.full_like(product, 32))


@pytest.mark.parametrize(
    ("instructions", "allowed"),
    [((False, True), "auto, float32, bfloat16$"), ((False, False), "auto, float32$")],
    indirect=["instructions"],
)
@pytest.mark.usefixtures("instructions")
def test_float16_is_refused_before_weights_are_read(folder: Path, allowed: str) -> None:
    config = EngineConfig(model=str(folder), dtype="float16", device="cpu", cache=CacheConfig(num_blocks=4))
    with pytest.raises(ModelError, match=f"^`dtype` float16 .*{allowed}"):
        load_model(config)


@pytest.mark.parametrize("instructions", [(True, True), (False, True)], indirect=True)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_quantized_weights_need_no_product_of_float16(
    folder: Path, quantization: str, instructions: None, request: pytest.FixtureRequest
) -> None:
    config = EngineConfig(
        model=str(folder),
        dtype="float16",
        device="cpu",
        quantization=quantization,
        cache=CacheConfig(num_blocks=4),
    )
    has_float16 = request.node.callspec.params["instructions"][0]
    is_refused = quantization == "none" and not has_float16
    with pytest.raises(ModelError, match="float16" if is_refused else "safetensors"):
        load_model(config)


@pytest.mark.parametrize(
    ("instructions", "chosen"),
    [((False, True), "bfloat16"), ((False, False), "float32"), ((True, True), "bfloat16")],
    indirect=["instructions"],
)
@pytest.mark.usefixtures("instructions")
def test_auto_never_takes_float16_on_a_cpu(chosen: str) -> None:
    dtype = choose_dtype("auto", "float16", CPU)
    assert dtype is DTYPES[chosen]
    check_products(dtype, CPU)
    assert choose_dtype("auto", "float16", torch.device("cuda")) is torch.float16
    check_products(torch.float16, torch.device("cuda"))
