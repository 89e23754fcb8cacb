"""The table of shapes: what PEFT's options, versions, wrappers and exporters make of an adapter."""

from functools import partial
from typing import Any

import peft
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
    without,
)

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
LAYER = "base_model.model.model.layers.0"
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
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
RANKS = [
    S(name="peft's defaults", lora={"r": 8}),
    S(name="rank 1", lora=QV | {"r": 1}),
    S(name="rank 17, alpha 3", lora={"r": 17, "lora_alpha": 3, "target_modules": SEVEN}),
    S(name="fractional alpha", edits=(config(lora_alpha=2.5),), reference="loaded"),
    S(name="alpha 0", edits=(config(lora_alpha=0),), reference="loaded", warned="changes nothing"),
    S(name="negative alpha", edits=(config(lora_alpha=-8),), reference="loaded"),
    S(name="rslora", lora={"use_rslora": True, "lora_alpha": 16, "target_modules": SEVEN}),
    S(name="dropout", lora=QV | {"lora_dropout": 0.1}),
    S(
        name="rank_pattern by name",
        lora={"target_modules": SEVEN, "rank_pattern": {"q_proj": 2, "mlp.up_proj": 9}},
    ),
    S(
        name="rank_pattern by path",
        lora={"target_modules": SEVEN, "rank_pattern": {"^model.layers.1.mlp.up_proj": 2}},
    ),
    S(
        name="rank_pattern by expression",
        lora={"target_modules": SEVEN, "rank_pattern": {r".*\.layers\.0\..*_proj": 2}},
    ),
    S(name="rank_pattern escaped", lora=QV | {"rank_pattern": {r"model\.layers\.1\.self_attn\.q_proj": 3}}),
    S(name="alpha_pattern by name", lora=QV | {"alpha_pattern": {"v_proj": 32}}),
    S(
        name="alpha_pattern by expression",
        lora={"target_modules": SEVEN, "alpha_pattern": {r"(gate|up)_proj": 2, ".*": 5}},
    ),
    S(
        name="the first pattern decides",
        lora=QV | {"alpha_pattern": {r"layers\.0\..*": 3, "q_proj": 7, "^model.*": 9}},
        # PEFT sorts the keys when it saves them.
        reference="loaded",
        warned="alpha_pattern.q_proj matches no",
    ),
    S(name="a dot is any character", lora=QV | {"alpha_pattern": {"q.proj": 3}}),
    S(name="alternatives without brackets", lora=QV | {"alpha_pattern": {r"q_proj|v_proj": 3}}),
    S(
        name="patterns and rslora",
        lora={
            "target_modules": SEVEN,
            "use_rslora": True,
            "rank_pattern": {"k_proj|o_proj": 2},
            "alpha_pattern": {"^.*o_proj": 3},
        },
    ),
    S(
        name="a pattern without a module",
        lora=QV | {"alpha_pattern": {"up_proj": 3}},
        warned="alpha_pattern.up_proj matches no",
    ),
    S(
        name="rank above the limit",
        lora=QV | {"r": 257},
        refused="from 1 to 256",
        though_plain="a limit with a number",
    ),
]
TARGETS = [
    S(name="all-linear", lora={"target_modules": "all-linear"}),
    S(
        name="ALL-LINEAR as typed",
        lora=QV,
        edits=(config(target_modules="All-Linear"),),
        warned="no tensor for",
    ),
    S(name="seven", lora={"target_modules": SEVEN}),
    S(name="long endings", lora={"target_modules": ["self_attn.q_proj", "1.mlp.up_proj"]}),
    S(
        name="whole paths",
        lora={"target_modules": ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"]},
    ),
    S(name="one expression", lora={"target_modules": r".*(q_proj|v_proj)$"}),
    S(name="an expression of layers", lora={"target_modules": r".*\.layers\.[1].*\.(q|down)_proj"}),
    S(name="unsloth's expression", lora={"target_modules": UNSLOTH}),
    S(name="a lookahead", lora={"target_modules": r"^(?!.*layers\.0).*\.(q|k|v|o)_proj$"}),
    S(name="an expression with flags", lora={"target_modules": r"(?i).*\.Q_PROJ"}),
    S(
        name="exclude a list",
        lora={"target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.up_proj", "k_proj"]},
    ),
    S(name="exclude by expression", lora={"target_modules": SEVEN, "exclude_modules": r".*\.layers\.0\..*"}),
    S(name="one layer by number", lora=QV | {"layers_to_transform": 1}),
    S(name="layers by list", lora=QV | {"layers_to_transform": [1], "layers_pattern": "layers"}),
    S(
        name="layers by another pattern",
        lora=QV | {"layers_to_transform": [0], "layers_pattern": ["h", "model.layers"]},
    ),
    S(
        name="an extra target",
        edits=(config(target_modules=["q_proj", "v_proj", "c_attn", "o_proj"]),),
        warned="c_attn, o_proj",
    ),
    S(
        name="a layer without tensors",
        edits=(without("layers.1"),),
        reference="loaded",
        warned="layers.1.self_attn.q_proj",
    ),
    S(name="no target_modules", edits=(config(target_modules=ABSENT),), warned="PEFT's defaults are used"),
    S(
        name="an untargeted tensor",
        edits=(config(target_modules=["q_proj"]),),
        refused="target_modules does not name it: add it",
    ),
    S(name="no targets", edits=(config(target_modules=[]),), refused="at least one module name"),
    S(
        name="a broken expression",
        edits=(config(target_modules="(q_proj"),),
        refused="is not a regular expression",
    ),
    S(
        name="layers of an expression",
        edits=(config(target_modules=".*q_proj", layers_to_transform=[0]),),
        refused="must be null where",
    ),
    S(
        name="weights as target_parameters",
        lora={"target_modules": ["v_proj"], "target_parameters": ["up_proj.weight"]},
    ),
    S(
        name="parameters of another model",
        edits=(config(target_parameters=["experts.gate_up_proj"]),),
        warned="holds no tensor for experts.gate_up_proj",
    ),
]
INITIALISATIONS = [
    *(
        S(name=f"init {init}", lora=QV | {"init_lora_weights": init})
        for init in (True, False, "gaussian", "eva", "orthogonal", "mica")
    ),
    *(
        S(name=f"init {init}", lora=QV | {"init_lora_weights": init}, refused="changes the base weights")
        for init in ("pissa", "pissa_niter_2", "olora")
    ),
    S(
        name="init lora_ga",
        lora=QV | {"init_lora_weights": "lora_ga"},
        refused="path_initial_model_for_weight_conversion",
        though_plain="the base weights it was trained on are not those that PEFT loads it on",
    ),
    *(
        S(name=f"init {init}", edits=(config(init_lora_weights=init),), refused="changes the base weights")
        for init in ("loftq", "corda")
    ),
    S(
        name="leftovers of initialisations",
        edits=(config(loftq_config={"loftq_bits": 4}, corda_config={}, eva_config={"rho": 2.0}),),
    ),
]
VOCABULARY = [
    S(name="embedding", lora={"target_modules": ["embed_tokens", "o_proj"]}),
    S(name="head", lora={"target_modules": ["lm_head", "q_proj"]}),
    S(
        name="embedding without its copy",
        lora={"target_modules": ["embed_tokens"]},
        save={"save_embedding_layers": False},
    ),
    S(name="embedding by expression", lora={"target_modules": r".*(embed_tokens|lm_head|q_proj)"}),
    S(name="tied embedding and head", base="tied", lora={"target_modules": ["embed_tokens", "lm_head"]}),
    S(
        name="tied by ensure_weight_tying",
        base="tied",
        lora={"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    ),
    S(
        name="untied with ensure_weight_tying",
        lora={"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
    ),
    S(name="copies of embedding and head", save={"save_embedding_layers": True}),
    S(name="copies, tied", base="tied", save={"save_embedding_layers": True}),
    S(
        name="copies in bfloat16",
        save={"save_embedding_layers": True},
        edits=(cast(torch.bfloat16),),
        reference="loaded",
    ),
    S(name="copies never saved", save={"save_embedding_layers": False}),
    S(name="untouched modules_to_save", lora=QV | {"modules_to_save": ["lm_head", "embed_tokens"]}),
    S(
        name="modules_to_save as an old PEFT named it",
        lora=QV | {"modules_to_save": ["lm_head"]},
        edits=(replaced("lm_head.weight", "lm_head.modules_to_save.weight"),),
    ),
    S(name="modules_to_save of a classifier", lora=QV | {"modules_to_save": ["classifier", "score"]}),
    S(
        name="a trained head",
        lora=QV | {"modules_to_save": ["lm_head"]},
        edits=(tensors(lambda found: {n: t + 0.01 if "lm_head" in n else t for n, t in found.items()}),),
        refused="differs from the base model's own",
    ),
    S(
        name="a resized embedding",
        save={"save_embedding_layers": True},
        edits=(with_tensor("base_model.model.model.embed_tokens.weight", 130, 64),),
        refused="must have the base model's shape [128, 64]",
    ),
    S(
        name="a trained norm",
        lora=QV | {"modules_to_save": ["norm"]},
        edits=(tensors(lambda found: {n: t + 0.5 if "norm" in n else t for n, t in found.items()}),),
        refused="norm",
    ),
    S(
        name="modules_to_save without its tensor",
        lora=QV | {"modules_to_save": ["lm_head"]},
        edits=(without("lm_head"),),
        refused="holds no copy of it",
    ),
]
VARIANTS = [
    S(name="DoRA", lora=QV | {"use_dora": True}, refused="DoRA is not supported: convert it"),
    S(
        name="lora_bias",
        lora=QV | {"lora_bias": True},
        edits=(tensors(lambda found: {n: t + 1 for n, t in found.items()}),),
        refused="lora_bias=False",
    ),
    S(name="bias all, of a model without biases", lora=QV | {"bias": "all"}),
    S(name="bias lora_only, of a model without biases", lora=QV | {"bias": "lora_only"}),
    S(
        name="a trained bias",
        edits=(with_tensor(f"{LAYER}.self_attn.q_proj.bias", 64),),
        refused="biases are not supported",
    ),
    S(
        name="trainable tokens",
        lora=QV | {"trainable_token_indices": [3, 4]},
        edits=(tensors(lambda found: {n: t + 1 for n, t in found.items()}),),
        refused="trained single tokens",
    ),
    S(name="fan_in_fan_out", edits=(config(fan_in_fan_out=True),)),
    S(name="VeLoRA", lora=QV | {"velora_config": {"num_groups": 4}}),
    S(name="QA-LoRA of linear layers", lora=QV | {"use_qalora": True}),
    S(name="KaSA", lora=QV | {"kasa_config": {}}, refused="KaSA"),
    S(
        name="block-diagonal",
        lora=QV | {"use_bdlora": {"target_modules_bd_a": ["q_proj", "v_proj"], "nblocks": 2}},
        refused="block-diagonal",
    ),
    S(
        name="MonteCLoRA",
        lora=QV | {"monteclora_config": {}},
        refused="MonteCLoRA",
        though_plain="PEFT samples while it trains only; its samplers are tensors of the file",
    ),
    S(
        name="activated LoRA",
        lora=QV | {"alora_invocation_tokens": [3]},
        refused="activated LoRA",
        though_plain="it begins where the prompt invokes it, which PEFT is told when it generates",
    ),
    S(
        name="layer_replication",
        edits=(config(layer_replication=[[0, 2], [0, 2]]),),
        refused="replicated layers",
    ),
    S(name="megatron", edits=(config(megatron_config={"hidden_size": 64}),), refused="Megatron"),
]
METHODS = [
    S(
        name=f"method {method.__name__}",
        lora=method(task_type="CAUSAL_LM", **settings),
        refused='must be "LORA"',
    )
    for method, settings in (
        (peft.IA3Config, {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        (peft.LoHaConfig, QV),
        (peft.LoKrConfig, QV),
        (peft.AdaLoraConfig, QV | {"total_step": 10}),
        (peft.VeraConfig, QV),
        (peft.OFTConfig, QV | {"oft_block_size": 8}),
        (peft.PromptTuningConfig, {"num_virtual_tokens": 4}),
        (peft.PrefixTuningConfig, {"num_virtual_tokens": 4}),
    )
]
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
ZOO = (*RANKS, *TARGETS, *INITIALISATIONS, *VOCABULARY, *VARIANTS, *METHODS, *FILES, *NAMES, *WRITERS)
