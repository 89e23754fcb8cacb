"""The table of shapes: what PEFT's options, versions, wrappers and exporters make of an adapter."""

from functools import partial

import peft
import torch
from tests.outside.adapters.exporters import LAYER, QV, SEVEN, WRITTEN
from tests.outside.adapters.shapes import (
    ABSENT,
    Shape,
    cast,
    config,
    replaced,
    tensors,
    with_tensor,
    without,
)

UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
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
        name="tied by ensure_weight_tying, of which the head is named",
        base="tied",
        lora={"target_modules": ["lm_head", "q_proj"], "ensure_weight_tying": True},
    ),
    S(
        name="tied by ensure_weight_tying, by expression",
        base="tied",
        lora={"target_modules": ".*(lm_head|q_proj)", "ensure_weight_tying": True},
    ),
    S(
        name="tied by ensure_weight_tying, embedding by expression",
        base="tied",
        lora={"target_modules": ".*(embed_tokens|q_proj)", "ensure_weight_tying": True},
    ),
    S(
        name="tied by ensure_weight_tying before the head is excluded",
        base="tied",
        lora={
            "target_modules": ["embed_tokens", "q_proj"],
            "ensure_weight_tying": True,
            "exclude_modules": ["lm_head"],
        },
    ),
    S(
        name="half of a tied pair",
        base="tied",
        lora={"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        edits=(tensors(lambda found: {n: t for n, t in found.items() if "lm_head.lora" not in n}),),
        refused="with ensure_weight_tying save embedding and head",
        though_plain="PEFT writes both, and a half is as likely a file that lost a part",
    ),
    S(
        name="untied with ensure_weight_tying",
        lora={"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        warned="no tensor for lm_head",
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
    S(
        name="modules_to_save by expression",
        edits=(config(modules_to_save=["q.*"]),),
        refused="must be the name of a module",
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
ZOO = (*RANKS, *TARGETS, *INITIALISATIONS, *VOCABULARY, *VARIANTS, *METHODS, *WRITTEN)
