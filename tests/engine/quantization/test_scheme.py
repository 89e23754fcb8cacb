"""Which parameters are rounded, to what, and what the decoder does with them."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ModelError
from loraplex.engine.model_loading import load_model
from loraplex.engine.models.decoder_state import DecoderState
from loraplex.engine.quantization.checkpoint_format import Sharing, StoredWeight, StoredWeights
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat, dequantize
from loraplex.engine.quantization.scheme import check_stored, quantize_parameter


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with tied embeddings; some inputs are no multiple of 128."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tied")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def state_of(folder: Path, scheme: str) -> DecoderState:
    config = load_model_config(str(folder))
    return decoder_state(config, open_checkpoint(str(folder), config), torch.float32, scheme=scheme)


@pytest.mark.parametrize(("scheme", "bits"), [("int8", WeightFormat.INT8), ("int4", WeightFormat.INT4)])
def test_projections_and_head_are_rounded_and_nothing_else(
    model_folder: Path, scheme: str, bits: WeightFormat
) -> None:
    state = state_of(model_folder, scheme)
    quantized = {name: weight for name, weight in state.items() if isinstance(weight, QuantizedWeight)}
    projections = {f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")}
    assert set(quantized) == projections | {"lm_head"}
    assert {quantized[name].format for name in projections} == {bits}
    assert quantized["lm_head"].format is WeightFormat.INT8
    embedding = state["embed_tokens"]
    assert isinstance(embedding, torch.Tensor) and embedding.dtype is torch.float32


def test_int4_takes_the_largest_groups_that_divide_the_inputs(model_folder: Path) -> None:
    state = state_of(model_folder, "int4")
    sizes = {name: w.group_size for name, w in state.items() if isinstance(w, QuantizedWeight)}
    assert sizes["layers.0.qkv"] == 32 and sizes["layers.0.down"] == 128


def test_fp8_is_of_projections_and_head(model_folder: Path) -> None:
    state = state_of(model_folder, "fp8")
    formats = {w.format for w in state.values() if isinstance(w, QuantizedWeight)}
    assert formats == {WeightFormat.FP8} and isinstance(state["lm_head"], QuantizedWeight)


@pytest.mark.parametrize(("scheme", "most"), [("int8", 0.012), ("int4", 0.16), ("fp8", 0.03)])
def test_rounding_loses_little(model_folder: Path, scheme: str, most: float) -> None:
    dense, rounded = state_of(model_folder, "none"), state_of(model_folder, scheme)
    for name, weight in rounded.items():
        if isinstance(weight, QuantizedWeight):
            original = dense[name]
            assert isinstance(original, torch.Tensor)
            error = (dequantize(weight) - original).norm() / original.norm()
            assert 0 < error < most, name


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    weight = torch.ones(4, 32)
    weight[2, 3] = torch.nan
    with pytest.raises(ModelError, match=r"layers\.1\.o.*finite"):
        quantize_parameter("layers.1.o", weight, "int8")


def test_an_unknown_scheme_is_refused(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="none, int8, int4, fp8.*int3"):
        load_model(EngineConfig(model=str(model_folder), quantization="int3"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_checkpoint_in_fp8_is_refused_by_a_gpu_that_cannot_multiply_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    eight, integers = (
        StoredWeights({"Linear": StoredWeight(8, is_float, False, Sharing.CHANNEL, None, True)}, ())
        for is_float in (True, False)
    )
    device = torch.device("cuda")
    check_stored(None, device)
    check_stored(integers, device)
    check_stored(eight, torch.device("cpu"))
    if capability < (8, 9):
        with pytest.raises(ModelError, match=r"fp8 need a CUDA device of compute capability 8\.9"):
            check_stored(eight, device)
    else:
        check_stored(eight, device)


def test_fp8_is_refused_on_a_cpu(model_folder: Path) -> None:
    with pytest.raises(ModelError, match="fp8 needs a CUDA device.*int8"):
        load_model(EngineConfig(model=str(model_folder), quantization="fp8", device="cpu"))
