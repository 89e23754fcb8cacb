"""The worksheet against arithmetic by hand, its advice against itself, and its figures against what a start allocates."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex.engine.capacity.memory_advice import format_bytes, memory_advice
from loraplex.engine.capacity.memory_plan import (
    CPU_KV_BYTES,
    Machine,
    MemoryPlan,
    Workload,
    adapter_bytes,
    plan_memory,
)
from loraplex.engine.capacity.weight_bytes import has_dense_products, weight_bytes
from loraplex.engine.checkpoints.config_reader import normalise_config
from loraplex.engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from loraplex.engine.engine import Engine
from loraplex.engine.errors import AdapterLoadFailed, ModelError
from loraplex.engine.lora.device_batch import make_workspace
from loraplex.engine.lora.memory.packed_adapter import pack, page_bytes
from loraplex.engine.lora.memory.rank_quantization import QuantizedModule, quantize_module
from loraplex.engine.lora.memory.slab_allocator import SlabAllocator, choose_slab_bytes
from loraplex.engine.lora.page_geometry import MIN_SCALE_BYTES
from loraplex.engine.lora.site import make_site
from loraplex.engine.lora.weights import LoraModule, LoraWeights
from loraplex.engine.messages import AdapterRef
from loraplex.engine.model_loading import load_model
from loraplex.engine.models.config import ModelConfig

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
SMOLLM2_135M = LLAMA_3_8B | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
GB = 10**9
LLAMA, SMOLLM = normalise_config(LLAMA_3_8B), normalise_config(SMOLLM2_135M)


def config_of(quantization: str = "none", **lora: Any) -> EngineConfig:
    return EngineConfig(model="m", quantization=quantization, lora=LoraConfig(**lora))


def gpu(memory: float, free: float | None = None) -> Machine:
    return Machine(
        is_cuda=True, dtype="bfloat16", memory=int(memory), free=None if free is None else int(free)
    )


def formats(plan: MemoryPlan) -> dict[str, tuple[str, int]]:
    return {weight.kind: (weight.format, weight.num_bytes) for weight in plan.weights}


def test_llama_3_8b_in_bfloat16() -> None:
    plan = plan_memory(LLAMA, config_of(max_bytes=512 << 20), gpu(141 * GB), Workload(context=512))
    layer = 4096 * (4096 + 1024 + 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert formats(plan) == {
        "embeddings": ("bfloat16", 2 * 128256 * 4096),
        "projections": ("bfloat16", 2 * 32 * layer),
        "lm_head": ("bfloat16", 2 * 128256 * 4096),
        "norms and biases": ("bfloat16", 2 * (32 * 2 + 1) * 4096),
    }
    streamed = plan.weights_bytes - 2 * 128256 * 4096
    assert round(streamed / GB, 1) == 15.0
    assert plan.kv_token_bytes == 131_072
    assert [(a.page_dtype, a.num_bytes) for a in plan.adapters] == [
        ("bfloat16", 83_886_080),
        ("int8", 41_943_040 + 64 * 7 * 32),
        ("fp8", 41_943_040 + 64 * 7 * 32),
    ]
    assert [a.resident for a in plan.adapters] == [6, 12, 12]


def test_the_kv_cache_of_a_gpu_gets_what_is_left() -> None:
    plan = plan_memory(LLAMA, config_of(max_bytes=512 << 20), gpu(141 * GB), Workload(context=512))
    left = int(141 * GB * 0.9) - plan.weights_bytes - plan.reserve_bytes - (512 << 20)
    assert plan.kv_bytes == left // (16 * 131_072) * 16 * 131_072
    assert plan.kv_tokens == plan.kv_bytes // 131_072
    assert plan.rows == plan.kv_tokens // 512
    assert plan.fits and plan.total <= 141 * GB * 0.9
    assert 0.5 * GB < plan.reserve_bytes < 3 * GB


@pytest.mark.parametrize(("model", "rank"), [(LLAMA, 256), (SMOLLM, 8)])
def test_hidden_values_of_adapters_have_room(model: ModelConfig, rank: int) -> None:
    """A long step's are more than the estimates could hide: 940 MB of 65,536 tokens at rank 256."""
    config = replace(config_of(max_rank=rank), scheduler=SchedulerConfig(max_num_batched_tokens=4096))
    groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    shapes, cpu = model.projection_shapes(), torch.device("cpu")
    sites = [
        make_site(names, shapes[names[0]][1], tuple(shapes[name][0] for name in names), 1, cpu, rank)
        for names in groups
    ]
    sites.append(make_site(("lm_head",), model.hidden_size, (model.vocab_size,), 1, cpu, rank))
    planned = dict(plan_memory(model, config, gpu(141 * GB)).reserve)["adapters' hidden values"]
    assert planned == make_workspace(sites, 4096, cpu).hidden.nbytes
    assert (
        dict(plan_memory(model, config_of(max_bytes=0), gpu(141 * GB)).reserve)["adapters' hidden values"]
        == 0
    )


@pytest.mark.parametrize("page_dtype", ["auto", "int8"])
def test_adapters_of_a_gpu_get_a_quarter_of_what_the_model_leaves(page_dtype: str) -> None:
    """64 adapters of rank 16 on every site of an 8B model on a card of 80 GB, embedding and head among them."""
    config = config_of(page_dtype=page_dtype)
    plan = plan_memory(LLAMA, config, gpu(80 * GB))
    assert plan.budget is not None
    left = plan.budget - plan.weights_bytes - plan.reserve_bytes
    assert plan.adapter_budget == left // 4
    assert left - plan.adapter_budget - plan.kv_bytes < 16 * 131_072 and plan.fits
    assert plan.adapters[0].resident >= 64 and not any(
        "adapter_bytes" in text for text in advice(LLAMA, config, plan)
    )
    shapes = [*LLAMA.projection_shapes().values()] * LLAMA.num_layers + [(4096, 128_256), (128_256, 4096)]
    dtype = torch.bfloat16 if page_dtype == "auto" else torch.int8
    need = Counter(page_bytes(16, width, dtype) for shape in shapes for width in shape)
    if page_dtype == "int8":
        need[MIN_SCALE_BYTES] = len(shapes)
    arena = SlabAllocator(plan.adapter_budget, choose_slab_bytes(need))
    for _ in range(64):
        arena.allocate(need)


@pytest.mark.parametrize(
    ("machine", "kv_bytes", "expected"),
    [
        (gpu(20 * GB), None, lambda room: 512 << 20),
        (gpu(80 * GB), 10 * GB, lambda room: room // 4),
        (gpu(80 * GB), 50 * GB, lambda room: room - 50 * GB),
        (gpu(80 * GB), 54 * GB, lambda room: 512 << 20),
        (Machine(is_cuda=True, dtype="bfloat16"), None, lambda room: 512 << 20),
        (Machine(is_cuda=False, dtype="bfloat16"), None, lambda room: 512 << 20),
    ],
)
def test_adapters_without_a_setting_leave_a_requested_kv_cache_its_size(
    machine: Machine, kv_bytes: int | None, expected: Callable[[int], int]
) -> None:
    config = replace(config_of(), cache=CacheConfig(kv_bytes=kv_bytes))
    plan = plan_memory(LLAMA, config, machine)
    assert plan.adapter_budget == expected((plan.budget or 0) - plan.weights_bytes - plan.reserve_bytes)


def test_a_setting_for_adapters_wins() -> None:
    for max_bytes in (0, 1 << 30, 40 * GB):
        assert plan_memory(LLAMA, config_of(max_bytes=max_bytes), gpu(80 * GB)).adapter_budget == max_bytes
    too_many = config_of(max_bytes=70 * GB)
    assert any(
        "`adapter_bytes` of at most" in text
        for text in advice(LLAMA, too_many, plan_memory(LLAMA, too_many, gpu(80 * GB)))
    )


def test_what_others_hold_is_not_planned_with() -> None:
    config = config_of(max_bytes=512 << 20)
    alone, beside = (plan_memory(LLAMA, config, gpu(80 * GB, free)) for free in (None, 60 * GB))
    assert (alone.budget, beside.budget) == (72 * GB, 60 * GB)
    assert alone.kv_bytes - beside.kv_bytes == pytest.approx(12 * GB, abs=4 << 20)


def test_llama_3_8b_quantized() -> None:
    int8 = formats(plan_memory(LLAMA, config_of("int8"), gpu(80 * GB)))
    int4 = formats(plan_memory(LLAMA, config_of("int4"), gpu(80 * GB)))
    outputs = 32 * (4096 + 2048 + 4096 + 2 * 14336 + 4096)
    assert int8["projections"] == ("int8", 6_979_321_856 + 2 * outputs)
    assert int8["lm_head"] == int4["lm_head"] == ("int8", 128256 * 4096 + 2 * 128256)
    assert int4["projections"] == ("int4/128", 6_979_321_856 * 67 // 128)
    assert int4["embeddings"][0] == "bfloat16"
    fp8 = formats(plan_memory(LLAMA, config_of("fp8"), gpu(80 * GB)))
    assert fp8["projections"] == ("fp8", 6_979_321_856 + 4 * outputs)
    assert fp8["lm_head"] == ("fp8", 128256 * 4096 + 4 * 128256)


def test_caches_and_pages_of_8_bits() -> None:
    config = replace(config_of(page_dtype="int8"), cache=CacheConfig(kv_dtype="fp8"))
    plan = plan_memory(LLAMA, config, gpu(80 * GB))
    assert plan.kv_token_bytes == 65_536
    assert [a.page_dtype for a in plan.adapters] == ["int8", "bfloat16", "fp8"]


def test_smollm2_ties_its_head_until_it_is_quantized() -> None:
    plan = plan_memory(SMOLLM, config_of(), gpu(8 * GB))
    assert "lm_head" not in formats(plan)
    assert plan.weights_bytes == 2 * 134_515_008
    assert plan.kv_token_bytes == 2 * 3 * 64 * 30 * 2
    assert formats(plan_memory(SMOLLM, config_of("int8"), gpu(8 * GB)))["lm_head"] == (
        "int8",
        49152 * 576 + 2 * 49152,
    )


@pytest.mark.parametrize("rank", [1, 8, 16, 17, 64])
@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_adapters_take_what_they_are_packed_into(rank: int, page_dtype: torch.dtype) -> None:
    model = normalise_config(SMOLLM2_135M | {"num_hidden_layers": 2})
    modules: dict[str, LoraModule | QuantizedModule] = {}
    for layer in range(2):
        for name, (outputs, inputs) in model.projection_shapes().items():
            module = LoraModule(torch.ones(rank, inputs), torch.ones(outputs, rank))
            quantized = page_dtype is not torch.bfloat16
            modules[f"layers.{layer}.{name}"] = quantize_module(module, page_dtype) if quantized else module
    names = tuple(modules)
    packed = pack("d", modules, page_dtype, names=names, max_pages=4, by_size=True)
    name = {torch.bfloat16: "bfloat16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[page_dtype]
    assert adapter_bytes(model, rank, name) == packed.blob.nbytes


def test_a_cpu_is_not_budgeted() -> None:
    plan = plan_memory(SMOLLM, config_of(), Machine(is_cuda=False, dtype="float32"))
    assert plan.budget is None and plan.fits
    assert CPU_KV_BYTES - 16 * plan.kv_token_bytes < plan.kv_bytes <= CPU_KV_BYTES
    assert [name for name, _ in plan.reserve] == ["activations of a step", "logits and sampling"]


def test_the_longest_row_is_what_the_pool_holds() -> None:
    cache = CacheConfig(block_size=16, num_blocks=10)
    plan = plan_memory(LLAMA, replace(config_of(), cache=cache), gpu(80 * GB))
    assert (plan.kv_tokens, plan.max_model_len, plan.context, plan.rows) == (160, 160, 160, 1)
    assert plan_memory(LLAMA, config_of(), gpu(80 * GB)).max_model_len == 8192
    with pytest.raises(ModelError, match=r"`max_model_len` must lie in 1\.\.8192, got 8193"):
        plan_memory(LLAMA, replace(config_of(), max_model_len=8193), gpu(80 * GB))


def advice(model: ModelConfig, config: EngineConfig, plan: MemoryPlan) -> list[str]:
    return [each.text for each in memory_advice(model, config, plan)]


def test_nothing_is_advised_where_all_is_served() -> None:
    config = replace(config_of(max_bytes=6 * GB), scheduler=SchedulerConfig(max_num_seqs=64))
    assert advice(LLAMA, config, plan_memory(LLAMA, config, gpu(141 * GB))) == []


def test_what_does_not_fit_at_once_is_reported() -> None:
    config = config_of(max_bytes=512 << 20)
    plan = plan_memory(LLAMA, config, gpu(24 * GB))
    assert plan.fits
    texts = advice(LLAMA, config, plan)
    assert f"{plan.rows} of `max_num_seqs` 64 rows fit with 8192 tokens each" in texts[0]
    assert "`adapter_bytes` holds 6 adapters of rank 16" in texts[1] and "5.37 GB would hold them" in texts[1]


FOUR_LAYERS = normalise_config(LLAMA_3_8B | {"num_hidden_layers": 4, "vocab_size": 32000})


@settings(max_examples=50, deadline=None)
@given(
    memory=st.integers(GB, 8 * GB),
    adapters=st.sampled_from([None, 0, 512 << 20, 2 << 30]),
    kv_bytes=st.sampled_from([None, 8 << 20, 256 << 20, 4 << 30]),
    context=st.sampled_from([None, 100, 8192]),
    scheme=st.sampled_from(["none", "int4"]),
)
def test_each_advice_is_enough(
    memory: int, adapters: int | None, kv_bytes: int | None, context: int | None, scheme: str
) -> None:
    config = replace(config_of(scheme, max_bytes=adapters), cache=CacheConfig(kv_bytes=kv_bytes))
    machine, workload = gpu(memory), Workload(context=context)
    plan = plan_memory(FOUR_LAYERS, config, machine, workload)
    reported_first = memory_advice(FOUR_LAYERS, config, plan)
    assert plan.fits is not any(each.needed for each in reported_first)
    for each in reported_first:
        if each.needed:
            follow_to_the_end(each.text, config, machine, workload)


def follow_to_the_end(text: str, config: EngineConfig, machine: Machine, workload: Workload) -> None:
    """At most one more is needed: a pool that was too small is made larger, then a memory that was too small for it."""
    for steps in range(2):
        config, machine, workload = follow(text, config, machine, workload)
        plan = plan_memory(FOUR_LAYERS, config, machine, workload)
        if plan.fits:
            return
        assert steps == 0 and config.cache.kv_bytes is not None, text
        text = memory_advice(FOUR_LAYERS, config, plan)[0].text
    raise AssertionError(text)


def follow(
    text: str, config: EngineConfig, machine: Machine, workload: Workload
) -> tuple[EngineConfig, Machine, Workload]:
    """What a reader of an advice does."""
    if found := re.match(r"`quantization` (\w+)", text):
        return replace(config, quantization=found[1]), machine, workload
    if found := re.match(r"a context .*of at most (\d+) tokens", text):
        return config, machine, Workload(context=int(found[1]))
    found = re.search(r"of at (most|least) ([\d.]+) (\w+)$", text)
    assert found is not None, text
    size = float(found[2]) * {"GB": 10**9, "MB": 10**6, "kB": 10**3}[found[3]]
    # The needed minimum is printed with two decimals, which may round it down.
    size *= 1.005 if found[1] == "least" else 1
    if text.startswith("`adapter_bytes`"):
        return replace(config, lora=LoraConfig(max_bytes=int(size))), machine, workload
    if text.startswith("`kv_cache_bytes`"):
        return replace(config, cache=CacheConfig(kv_bytes=int(size))), machine, workload
    assert text.startswith("a device")
    return config, gpu(size), workload


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 kB"), (131_072, "131.07 kB"), (83_886_080, "83.89 MB"), (15 * GB, "15.00 GB")],
)
def test_sizes_are_formatted_as_devices_are_sold(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_worksheet_needs_no_torch() -> None:
    program = "import sys, loraplex.engine.capacity.memory_advice; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


class NoAdapters:
    def load(self, adapter: AdapterRef) -> LoraWeights:
        raise AdapterLoadFailed("none here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(path)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(512)}, unk_token="<0>")).save(
        str(path / "tokenizer.json")
    )
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_start_takes_what_was_planned(folder: Path, dtype: str, quantization: str) -> None:
    config = EngineConfig(
        model=str(folder),
        dtype=dtype,
        device="cpu",
        quantization=quantization,
        cache=CacheConfig(kv_bytes=4_000_000),
    )
    model = load_model(config)
    engine = Engine(model, config, NoAdapters())
    engine.close()
    assert model.weights_bytes == model.memory.weights_bytes
    assert engine.runner.kv_cache_bytes == model.memory.kv_bytes
    assert model.max_model_len == model.memory.max_model_len == 512


def test_a_pool_without_a_block_is_refused(folder: Path) -> None:
    config = EngineConfig(model=str(folder), device="cpu", cache=CacheConfig(kv_bytes=1000))
    with pytest.raises(ModelError, match=r"does not fit: .*it takes `kv_cache_bytes` of at least"):
        load_model(config)


def test_a_checkpoint_that_is_quantized_is_planned_as_it_is_loaded() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    compression = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
    model = normalise_config(LLAMA_3_8B | {"quantization_config": compression})
    assert {weight.format for weight in plan_memory(model, config_of(), gpu(80 * GB)).weights} >= {"int8"}
    with pytest.raises(ModelError, match="`quantization` must be none for a checkpoint that is quantized"):
        plan_memory(model, config_of("int4"), gpu(80 * GB))


@pytest.mark.parametrize(
    ("scheme", "ignored", "is_dense"),
    [
        ("none", None, True),
        ("int4", None, False),
        ("none", [], False),
        ("none", ["lm_head"], True),
        ("none", ["model.layers.3.self_attn.o_proj"], True),
    ],
)
def test_one_projection_that_is_not_quantized_is_a_dense_product(
    scheme: str, ignored: list[str] | None, is_dense: bool
) -> None:
    """`ignored`: modules that a quantized checkpoint leaves alone; None: it is not quantized."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    compression = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }
    model = normalise_config(LLAMA_3_8B | ({} if ignored is None else {"quantization_config": compression}))
    assert has_dense_products(weight_bytes(model, "float16", scheme), "float16") is is_dense
