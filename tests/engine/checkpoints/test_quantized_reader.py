"""Checkpoints written by the compressed-tensors package, compared with its own decompression.

Our weights must have the same numbers: integers and scales are kept, so only the oracle's rounding to the scales' type
differs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.batch.forward_batch import BatchRows
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import PlannedRow, StepPlan
from loraplex.engine.capacity.weight_bytes import weight_bytes
from loraplex.engine.checkpoints.config_reader import load_model_config
from loraplex.engine.checkpoints.reader import open_checkpoint
from loraplex.engine.checkpoints.weights import decoder_state
from loraplex.engine.errors import ModelError
from loraplex.engine.kv_cache.tensors import allocate_kv_cache
from loraplex.engine.messages import EngineRequest
from loraplex.engine.models.decoder import Decoder
from loraplex.engine.models.decoder_state import DecoderState
from loraplex.engine.quantization.quantized_weight import QuantizedWeight, WeightFormat, dequantize
from loraplex.engine.sampling_params import SamplingParams

HIDDEN, INTERMEDIATE = 256, 512
Arguments = dict[str, Any]
TOKEN_INT8: Arguments = {"num_bits": 8, "strategy": "token", "dynamic": True}
TOKEN_FP8 = TOKEN_INT8 | {"type": "float"}


def int4(**changes: Any) -> Arguments:
    return {"num_bits": 4, "strategy": "group", "group_size": 32} | changes


# name -> (weights, input activations, type of the model, format of our weight, group size of our qkv)
CASES: dict[str, tuple[Arguments, Arguments | None, torch.dtype, WeightFormat, int]] = {
    "int4-32": (int4(), None, torch.bfloat16, WeightFormat.INT4, 32),
    "int4-64-asymmetric": (int4(group_size=64, symmetric=False), None, torch.float32, WeightFormat.INT4, 64),
    "int4-32-asymmetric-half": (int4(symmetric=False), None, torch.float16, WeightFormat.INT4, 32),
    "int4-64-ordered": (int4(group_size=64, actorder="weight"), None, torch.float32, WeightFormat.INT4, 64),
    "int4-256": (int4(group_size=256), None, torch.float32, WeightFormat.INT4, 128),
    "int4-channel": (int4(strategy="channel", group_size=None), None, torch.float32, WeightFormat.INT4, 128),
    "int4-channel-asymmetric": (
        int4(strategy="channel", group_size=None, symmetric=False),
        None,
        torch.bfloat16,
        WeightFormat.INT4,
        128,
    ),
    "int4-dynamic": (int4(), TOKEN_INT8, torch.float32, WeightFormat.INT4, 32),
    "int8-packed": ({"strategy": "channel"}, None, torch.bfloat16, WeightFormat.INT8, HIDDEN),
    "int8-packed-64": ({"strategy": "group", "group_size": 64}, None, torch.float32, WeightFormat.INT8, 64),
    "int8-tensor": ({"strategy": "tensor"}, None, torch.float32, WeightFormat.INT8, HIDDEN),
    "int8-dynamic": ({"strategy": "channel"}, TOKEN_INT8, torch.float32, WeightFormat.INT8, HIDDEN),
    "fp8-dynamic": (
        {"strategy": "channel", "type": "float"},
        TOKEN_FP8,
        torch.float32,
        WeightFormat.FP8,
        HIDDEN,
    ),
    "fp8-tensor": ({"strategy": "tensor", "type": "float"}, None, torch.float32, WeightFormat.FP8, HIDDEN),
}


@dataclass(frozen=True, slots=True)
class Compressed:
    """A checkpoint and what the oracle makes of it: a dense model in fp32. `scale_dtype` is what it rounds weights to."""

    path: Path
    dense: LlamaForCausalLM
    scale_dtype: torch.dtype

    def weight(self, *modules: str) -> Tensor:
        """fp32, the modules' weights one below the other."""
        return torch.cat([self.dense.get_submodule(module).weight.data for module in modules])


Make = Callable[[str], Compressed]


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a case once and returns it ever after."""
    made: dict[str, Compressed] = {}

    def get(name: str) -> Compressed:
        if name not in made:
            weights, activations, dtype, _, _ = CASES[name]
            group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
            made[name] = compress(tmp_path_factory.mktemp(name), {"group_0": group}, dtype)
        return made[name]

    return get


def compress(
    folder: Path,
    groups: dict[str, Any],
    dtype: torch.dtype,
    ignore: tuple[str, ...] = ("lm_head",),
) -> Compressed:
    """Saves a random model as the oracle does, and has it decompressed."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.15,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).to(dtype)
    quantization = QuantizationConfig(config_groups=groups, ignore=list(ignore))
    apply_quantization_config(model, quantization, show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    dense = LlamaForCausalLM(config).float()
    dense.load_state_dict({name: model.state_dict()[name].float() for name in dense.state_dict()})
    return Compressed(folder, dense.eval(), dtype)


def set_scales(module: Any) -> None:
    """As an observer of the smallest and largest weights does."""
    arguments, weight, shape = (
        module.quantization_scheme.weights,
        module.weight.data,
        module.weight_scale.shape,
    )
    grouped = weight.view(*(shape if len(shape) == 2 else (1, 1)), -1)
    scale, zero = calculate_qparams(grouped.amin(2).view(shape), grouped.amax(2).view(shape), arguments)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)


def load_state(path: Path, dtype: torch.dtype = torch.float32) -> DecoderState:
    config = load_model_config(str(path))
    return decoder_state(config, open_checkpoint(str(path), config), dtype)


def quantized(state: DecoderState, name: str) -> QuantizedWeight:
    weight = state[name]
    assert isinstance(weight, QuantizedWeight)
    return weight


SOURCES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_oracle_decompresses(compressed: Make, case: str) -> None:
    model, state = compressed(case), load_state(compressed(case).path)
    *_, kind, group_size = CASES[case]
    assert quantized(state, "layers.0.qkv").group_size == group_size
    for name, sources in SOURCES.items():
        weight = quantized(state, f"layers.0.{name}")
        assert weight.format is kind
        assert (weight.zeros is not None) is ("asymmetric" in case)
        theirs = model.weight(*(f"model.layers.0.{source}" for source in sources))
        assert weight.shape == theirs.shape
        assert torch.equal(dequantize(weight).to(model.scale_dtype).float(), theirs), name
    head = state["lm_head"]
    assert isinstance(head, Tensor) and torch.equal(head, model.weight("lm_head"))


@pytest.mark.parametrize("case", CASES)
def test_a_worksheet_counts_their_bytes(compressed: Make, case: str) -> None:
    path, dtype = compressed(case).path, compressed(case).scale_dtype
    weights = weight_bytes(load_model_config(str(path)), str(dtype).removeprefix("torch."), "none")
    assert sum(weight.num_bytes for weight in weights) == load_state(path, dtype).num_bytes


@pytest.mark.parametrize("case", ["int4-32", "int4-32-asymmetric-half", "int8-packed", "int8-dynamic"])
def test_scales_keep_their_bits(compressed: Make, case: str) -> None:
    tensors = load_file(compressed(case).path / "model.safetensors")
    weight = quantized(load_state(compressed(case).path), "layers.0.o")
    stored = tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    expected = torch.bfloat16 if stored.dtype is torch.bfloat16 else torch.float32
    assert weight.scales.dtype is expected
    assert torch.equal(weight.scales, stored.t().to(expected))


@pytest.mark.parametrize("case", ["int4-64-asymmetric", "int8-dynamic", "fp8-dynamic"])
def test_decoder_computes_with_the_dequantized_weights(compressed: Make, case: str) -> None:
    model = compressed(case)
    token_ids = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        theirs = model.dense(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
    ours = last_logits(model.path, token_ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def last_logits(path: Path, token_ids: list[int]) -> Tensor:
    """fp32 [vocabulary] after a prompt computed in one step."""
    config = load_model_config(str(path))
    decoder = Decoder(config, load_state(path), 64)
    request = EngineRequest(
        request_id="r", namespace=bytes(32), prompt_token_ids=token_ids, sampling=SamplingParams(max_tokens=1)
    )
    sequence = Sequence(request=request, choice=0, arrival=0.0, seed=0, token_ids=token_ids)
    row = PlannedRow(
        sequence=sequence,
        start=0,
        token_ids=tuple(token_ids),
        block_table=tuple(range(4)),
        adapter=None,
        samples=True,
    )
    cpu = torch.device("cpu")
    cache = allocate_kv_cache(config, 4, 16, torch.float32, cpu)
    return decoder.forward(BatchRows(StepPlan((row,)), 16, {}).batch(cpu, HostTransfers(cpu)), cache)[0]


def test_parts_of_a_matrix_may_differ_in_groups_and_zero_points(tmp_path: Path) -> None:
    model = compress(
        tmp_path,
        {
            "whole": {
                "targets": ["re:.*k_proj"],
                "weights": int4(strategy="channel", group_size=None),
            },
            "coarse": {"targets": ["Linear"], "weights": int4(group_size=64)},
            "fine": {
                "targets": ["model.layers.0.self_attn.q_proj", "re:.*up_proj$"],
                "weights": int4(symmetric=False),
            },
            "wide": {"targets": ["re:.*down_proj"], "weights": {"strategy": "channel"}},
        },
        torch.float32,
    )
    state = load_state(tmp_path)
    sizes = {name: quantized(state, f"layers.0.{name}").group_size for name in SOURCES}
    assert sizes == {"qkv": 32, "o": 64, "gate_up": 32, "down": INTERMEDIATE}
    for name, sources in SOURCES.items():
        theirs = model.weight(*(f"model.layers.0.{source}" for source in sources))
        assert torch.equal(dequantize(quantized(state, f"layers.0.{name}")), theirs), name


def test_parts_of_a_matrix_in_different_bits_are_refused(tmp_path: Path) -> None:
    compress(
        tmp_path,
        {
            "a": {"targets": ["re:.*k_proj"], "weights": {"strategy": "channel"}},
            "b": {"targets": ["Linear"], "weights": int4()},
        },
        torch.float32,
        ignore=("lm_head", "re:.*v_proj"),
    )
    with pytest.raises(
        ModelError,
        match=r"q_proj in 4 bits of integer, .*k_proj in 8 bits of integer, .*v_proj not quantized",
    ):
        load_state(tmp_path)


def test_a_head_that_is_quantized_is_loaded(tmp_path: Path) -> None:
    model = compress(
        tmp_path,
        {"group_0": {"targets": ["Linear"], "weights": {"strategy": "channel"}}},
        torch.float32,
        ignore=(),
    )
    head = quantized(load_state(tmp_path), "lm_head")
    assert torch.equal(dequantize(head), model.weight("lm_head"))


def test_a_quantized_checkpoint_is_not_quantized_again(compressed: Make) -> None:
    path = compressed("int8-dynamic").path
    config = load_model_config(str(path))
    with pytest.raises(ModelError, match="`quantization` must be none for a checkpoint that is quantized"):
        decoder_state(config, open_checkpoint(str(path), config), torch.float32, scheme="int8")


O_PROJ = "model.layers.0.self_attn.o_proj."
Tensors = dict[str, Tensor]
NAN_AT_3 = torch.zeros(256, 1).index_fill_(0, torch.tensor([3]), torch.nan)

# name -> (case, tensor of o_proj, its replacement or None, what the error says of it)
HOSTILE: dict[str, tuple[str, str, Tensor | None, str]] = {
    "missing scale": ("int4-64-asymmetric", "weight_scale", None, "lacks {name}"),
    "missing zero point": ("int4-64-asymmetric", "weight_zero_point", None, "lacks {name}"),
    "missing shape": ("int4-64-asymmetric", "weight_shape", None, "lacks {name}"),
    "g_idx": ("int4-64-asymmetric", "weight_g_idx", torch.zeros(256), "holds {name}"),
    "static scale": ("int8-dynamic", "input_scale", torch.ones(1), "holds {name}"),
    "short words": (
        "int4-64-asymmetric",
        "weight_packed",
        torch.zeros(256, 31, dtype=torch.int32),
        r"'{name}' must have shape \(256, 32\), got \(256, 31\)",
    ),
    "bytes": (
        "int4-64-asymmetric",
        "weight_packed",
        torch.zeros(256, 32, dtype=torch.uint8),
        "'{name}' must be int32, got uint8",
    ),
    "other shape": ("int4-64-asymmetric", "weight_shape", torch.tensor([256, 255]), "'{name}' must hold"),
    "no shape": ("int4-64-asymmetric", "weight_shape", torch.tensor(256), r"'{name}' must have shape \(2,\)"),
    "scale of one group": ("int4-64-asymmetric", "weight_scale", torch.ones(256, 1), r"got \(256, 1\)"),
    "scale in fp8": (
        "int4-64-asymmetric",
        "weight_scale",
        torch.ones(256, 4).to(torch.float8_e4m3fn),
        "'{name}' must be bfloat16 or float16 or float32, got float8_e4m3fn",
    ),
    "scale of integers": (
        "int8-dynamic",
        "weight_scale",
        torch.ones(256, 1, dtype=torch.int8),
        "'{name}' must be",
    ),
    "NaN scale": ("int8-dynamic", "weight_scale", NAN_AT_3, "'{name}' must be finite"),
    "infinite scale": (
        "int8-dynamic",
        "weight_scale",
        torch.full((256, 1), torch.inf),
        "'{name}' must be finite",
    ),
    "negative scale": ("int8-dynamic", "weight_scale", torch.full((256, 1), -1.0), "'{name}' .*not negative"),
    "wide zero point": (
        "int4-64-asymmetric",
        "weight_zero_point",
        torch.full((256, 4), 8, dtype=torch.int8),
        "'{name}' has values outside of -8..7",
    ),
    "zero point of bytes": (
        "int4-64-asymmetric",
        "weight_zero_point",
        torch.zeros(32, 4, dtype=torch.int8),
        "'{name}' must be int8 of shape",
    ),
    "zero point of floats": (
        "int4-64-asymmetric",
        "weight_zero_point",
        torch.zeros(256, 4),
        "'{name}' must be int8 or int32",
    ),
    "symmetric with zero point": (
        "int8-dynamic",
        "weight_zero_point",
        torch.ones(256, 1, dtype=torch.int8),
        "'{name}' must be zeros",
    ),
    "int8 as float": ("int8-dynamic", "weight", torch.zeros(256, 256), "'{name}' must be int8, got float32"),
    "int8 misshapen": (
        "int8-dynamic",
        "weight",
        torch.zeros(256, 255, dtype=torch.int8),
        r"'{name}' must have shape \(256, 256\)",
    ),
    "NaN in fp8": (
        "fp8-dynamic",
        "weight",
        torch.full((256, 256), torch.nan).to(torch.float8_e4m3fn),
        "'{name}' has values that are not finite",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_tensors_are_refused_by_name(compressed: Make, tmp_path: Path, name: str) -> None:
    case, tensor, replacement, message = HOSTILE[name]
    copied(compressed(case), tmp_path, {O_PROJ + tensor: replacement})
    with pytest.raises(ModelError, match=message.format(name=(O_PROJ + tensor).replace(".", r"\."))):
        load_state(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": int4(group_size=96, symmetric=False)}, "256 inputs are not whole groups of 96"),
        ({"targets": ["Linear", "Embedding"]}, "quantizes model.embed_tokens, which is not supported"),
        ({"targets": ["re:model"]}, "quantizes model.embed_tokens, which is not supported"),
        ({"targets": ["re:.*o_proj"]}, r"lacks model\.layers\.0\.mlp\.down_proj\.weight, "),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    compressed: Make, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = compressed("int4-64-asymmetric")
    config = json.loads((model.path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"] |= changes
    copied(model, tmp_path, {}, config)
    with pytest.raises(ModelError, match=message):
        load_state(tmp_path)


def test_older_forms_are_read(compressed: Make, tmp_path: Path) -> None:
    """Zero points one per element, zeros beside symmetric weights, a scale without dimensions."""
    packed = compressed("int4-64-asymmetric")
    zero = load_file(packed.path / "model.safetensors")[O_PROJ + "weight_zero_point"]
    shifts = torch.arange(8, dtype=torch.int32) * 4
    plain = ((zero[:, None] >> shifts[:, None]) & 15).flatten(0, 1).to(torch.int8) - 8
    copied(packed, tmp_path / "zero", {O_PROJ + "weight_zero_point": plain})
    ours = dequantize(quantized(load_state(tmp_path / "zero"), "layers.0.o"))
    assert torch.equal(ours, packed.weight(O_PROJ[:-1]))

    whole = compressed("int8-tensor")
    scale = load_file(whole.path / "model.safetensors")[O_PROJ + "weight_scale"].reshape(())
    added = {O_PROJ + "weight_scale": scale, O_PROJ + "weight_zero_point": torch.zeros(1, dtype=torch.int8)}
    copied(whole, tmp_path / "scale", added)
    ours = dequantize(quantized(load_state(tmp_path / "scale"), "layers.0.o"))
    assert torch.equal(ours, whole.weight(O_PROJ[:-1]))


def test_four_bits_one_per_byte_are_read_and_bounded(compressed: Make, tmp_path: Path) -> None:
    """The format of integers that are not packed holds any number of bits."""
    model = compressed("int4-dynamic")
    dense = {f"model.layers.0.{source}" for sources in SOURCES.values() for source in sources}
    tensors: dict[str, Tensor | None] = {}
    for module in dense:
        scale = load_file(model.path / "model.safetensors")[f"{module}.weight_scale"]
        integers = model.weight(module) / scale.float().repeat_interleave(32, dim=1)
        tensors |= {f"{module}.weight_packed": None, f"{module}.weight_shape": None}
        tensors[f"{module}.weight"] = integers.round().to(torch.int8)
    config = json.loads((model.path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    config["quantization_config"]["format"] = group["format"] = "int-quantized"
    copied(model, tmp_path, tensors, config)
    ours = dequantize(quantized(load_state(tmp_path), "layers.0.o"))
    assert torch.equal(ours, model.weight(O_PROJ[:-1]))
    tensors[O_PROJ + "weight"] = torch.full((256, 256), 8, dtype=torch.int8)
    copied(model, tmp_path, tensors, config)
    with pytest.raises(ModelError, match=r"o_proj\.weight' has values outside of -8\.\.7"):
        load_state(tmp_path)


def copied(
    model: Compressed, folder: Path, changes: dict[str, Tensor | None], config: dict[str, Any] | None = None
) -> None:
    """The checkpoint again in `folder` with other tensors; None leaves one out."""
    folder.mkdir(exist_ok=True)
    tensors: dict[str, Tensor | None] = {**load_file(model.path / "model.safetensors"), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    text = (model.path / "config.json").read_text() if config is None else json.dumps(config)
    (folder / "config.json").write_text(text)
