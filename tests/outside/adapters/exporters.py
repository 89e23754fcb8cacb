"""Shapes of files, names and configurations: what versions of PEFT, wrappers and other exporters write."""

from functools import partial
from typing import Any

import torch
from tests.outside.adapters.shapes import (
    ABSENT,
    Shape,
    cast,
    config,
    named,
    only,
    pickled,
    replaced,
    tensors,
    with_tensor,
)

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
LAYER = "base_model.model.model.layers.0"
# What PEFT of these versions wrote for a plain LoRA of q_proj and v_proj.
PEFT_0_3 = {
    "base_model_name_or_path": "tiny-llama",
    "bias": "none",
    "fan_in_fan_out": False,
    "enable_lora": None,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "r": 4,
    "merge_weights": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "v_proj"],
}
PEFT_0_5 = {key: value for key, value in PEFT_0_3.items() if key not in ("enable_lora", "merge_weights")} | {
    "auto_mapping": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "revision": None,
}
PEFT_0_8 = PEFT_0_5 | {
    "alpha_pattern": {},
    "rank_pattern": {},
    "loftq_config": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "use_rslora": False,
}
PEFT_0_13 = PEFT_0_8 | {"layer_replication": None, "use_dora": False}
PEFT_0_17 = PEFT_0_13 | {
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "lora_bias": False,
    "qalora_group_size": 16,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
}


def _written(fields: dict[str, Any]) -> Any:
    return only(**fields)


S = partial(Shape, lora=QV)
FILES = [
    S(name="float16", edits=(cast(torch.float16),), reference="loaded"),
    S(name="bfloat16", edits=(cast(torch.bfloat16),), reference="loaded"),
    S(name="float64", edits=(cast(torch.float64),), reference="loaded"),
    S(
        name="float8",
        edits=(cast(torch.float8_e4m3fn),),
        refused="is not one of F64, F32, F16, BF16",
        though_plain="no value of LoRA is trained in 3 bits: save it in bfloat16",
    ),
    S(
        name="empty shards of ZeRO-3",
        edits=(tensors(lambda found: {n: t[:0] for n, t in found.items()}),),
        refused="DeepSpeed ZeRO-3",
    ),
    S(
        name="a pickle",
        edits=(pickled,),
        refused="torch.load('adapter_model.bin'",
        though_plain="a pickle runs code",
    ),
]
NAMES = [
    S(name="under torch.compile", edits=(named(lambda n: f"_orig_mod.{n}"),)),
    S(name="torch.compile inside", edits=(replaced("base_model.model.", "base_model.model._orig_mod."),)),
    S(
        name="FSDP around layers",
        edits=(
            named(
                lambda n: n.replace("layers.0.", "layers.0._fsdp_wrapped_module.").replace(
                    "layers.1.", "layers.1._fsdp_wrapped_module."
                )
            ),
        ),
    ),
    S(
        name="FSDP around all, checkpointed",
        edits=(
            named(
                lambda n: (
                    "_fsdp_wrapped_module." + n.replace(".self_attn", "._checkpoint_wrapped_module.self_attn")
                )
            ),
        ),
    ),
    S(name="DDP", edits=(named(lambda n: f"module.{n}"),)),
    S(
        name="language_model outside",
        edits=(replaced("base_model.model.model.", "base_model.model.language_model.model."),),
    ),
    S(
        name="language_model inside",
        edits=(replaced("base_model.model.model.", "base_model.model.model.language_model."),),
    ),
    S(name="a bare AutoModel", base="bare", lora={"target_modules": SEVEN}),
    S(
        name="a bare AutoModel by expression",
        base="bare",
        lora={"target_modules": r"layers\.\d+\.self_attn\.q_proj", "alpha_pattern": {r"^layers\.1.*": 3}},
    ),
    S(
        name="the adapter's name",
        edits=(replaced("lora_A.", "lora_A.default."), replaced("lora_B.", "lora_B.default.")),
    ),
    S(
        name="another adapter's name",
        lora={"target_modules": ["embed_tokens", "q_proj"]},
        edits=(
            named(
                lambda n: (
                    n.replace("lora_A", "lora_A.my_run")
                    .replace("lora_B", "lora_B.my_run")
                    .replace("embedding_A", "embedding_A.my_run")
                    .replace("embedding_B", "embedding_B.my_run")
                )
            ),
        ),
    ),
    S(name="no base_model.model", edits=(replaced("base_model.model.", ""),)),
    S(
        name="compiled copies",
        save={"save_embedding_layers": True},
        edits=(named(lambda n: f"_orig_mod.{n}"),),
    ),
    S(
        name="one tensor twice",
        edits=(with_tensor(f"_orig_mod.{LAYER}.self_attn.q_proj.lora_A.weight", 4, 64),),
        refused="is the same tensor as",
    ),
    S(
        name="two adapters",
        edits=(
            named(
                lambda n: n.replace("q_proj.lora_A", "q_proj.lora_A.one").replace(
                    "v_proj.lora_A", "v_proj.lora_A.two"
                )
            ),
        ),
        refused="holds 2 adapters",
    ),
    S(
        name="another architecture",
        edits=(replaced("model.layers", "transformer.h"),),
        refused="matches no module of the base model",
    ),
    S(
        name="mlx-lm",
        edits=(
            named(
                lambda n: (
                    n.replace("base_model.model.", "")
                    .replace("lora_A.weight", "lora_a")
                    .replace("lora_B.weight", "lora_b")
                )
            ),
        ),
        refused="mlx-lm",
    ),
]
WRITERS = [
    S(name="PEFT 0.3", edits=(_written(PEFT_0_3),)),
    S(name="PEFT 0.5", edits=(_written(PEFT_0_5),)),
    S(name="PEFT 0.8", edits=(_written(PEFT_0_8),)),
    S(name="PEFT 0.13", edits=(_written(PEFT_0_13),)),
    S(name="PEFT 0.17", edits=(_written(PEFT_0_17),)),
    S(name="torchtune", edits=(only("r", "lora_alpha", "peft_type", target_modules=["q_proj", "v_proj"]),)),
    S(name="no lora_alpha", edits=(config(lora_alpha=ABSENT),), reference="loaded", warned="lora_alpha = 8"),
    S(name="no r", lora=QV | {"r": 8}, edits=(config(r=ABSENT),), reference="loaded", warned="r = 8"),
    S(
        name="null patterns",
        edits=(config(rank_pattern=None, alpha_pattern=None, use_rslora=None, loftq_config=None),),
    ),
    S(
        name="llama-factory",
        edits=(
            config(inference_mode=True, base_model_name_or_path="/data/models/tiny-llama", revision="main"),
        ),
    ),
    S(
        name="axolotl",
        edits=(
            config(target_modules=sorted(SEVEN), auto_mapping=None, lora_dropout=0.05, peft_version="0.17.1"),
        ),
        warned="holds no tensor for",
    ),
    S(
        name="unsloth",
        edits=(
            config(
                base_model_name_or_path="unsloth/tiny-llama-unsloth-bnb-4bit",
                auto_mapping={
                    "base_model_class": "LlamaForCausalLM",
                    "parent_library": "transformers.models.llama.modeling_llama",
                    "unsloth_fixed": True,
                },
            ),
        ),
    ),
    S(
        name="another base model",
        edits=(config(base_model_name_or_path="meta-llama/Llama-3.1-8B"),),
        warned='base_model_name_or_path is "meta-llama/Llama-3.1-8B"',
    ),
    S(name="a field of a newer PEFT, unused", edits=(config(use_next_lora=False, next_config=None),)),
    S(
        name="a field of a newer PEFT",
        edits=(config(use_next_lora=True),),
        refused="is not a known field",
        though_plain="what it would change is not known",
    ),
    S(name="no peft_type", edits=(config(peft_type=ABSENT),), refused='must be "LORA"'),
]
WRITTEN = (*FILES, *NAMES, *WRITERS)
