"""The fields of PEFT's `LoraConfig`: used, ignored or refused, each with what it does. A test holds them to the installed PEFT.

Invariant: each key is in one table; an unknown key must be empty, since it may change what the adapter computes.
"""

from collections.abc import Mapping
from typing import Final

from loraplex.adapters.errors import PeftConfigRejected
from loraplex.adapters.validation.shown import shown

EMPTY: Final[tuple[object, ...]] = (None, False, "", [], {})

USED: Final = {
    "peft_type": 'must be "LORA"',
    "r": "the rank where rank_pattern gives no other; 8 where it is missing",
    "lora_alpha": "the scale is alpha / rank; 8 where it is missing",
    "use_rslora": "the scale is alpha / sqrt(rank)",
    "rank_pattern": "ranks of modules",
    "alpha_pattern": "alphas of modules",
    "target_modules": "modules that have LoRA; q_proj and v_proj where it is missing, as in PEFT",
    "exclude_modules": "modules that have none",
    "target_parameters": "weights of linear modules, as if target_modules named the modules",
    "layers_to_transform": "numbers of layers in which target_modules count",
    "layers_pattern": "must name layers beside layers_to_transform",
    "init_lora_weights": "an initialisation that changes the base weights is refused",
    "modules_to_save": "must be untouched copies of the base model's embedding or head",
    "ensure_weight_tying": "target_modules that name the embedding or the head name both",
    "base_model_name_or_path": "another model is a warning",
}

# None of these changes the arithmetic. PEFT imports the class that `auto_mapping` names; nothing here reads it.
IGNORED: Final = {
    "auto_mapping": "names the class of the base model",
    "bias": "a trained bias is a tensor of the file, which is refused by its name",
    "corda_config": "of an initialisation",
    "eva_config": "of an initialisation",
    "fan_in_fan_out": "of Conv1D; PEFT sets it to false for linear layers",
    "inference_mode": "whether PEFT trains",
    "lora_dropout": "during training only",
    "lora_ga_config": "of an initialisation",
    "loftq_config": "of an initialisation",
    "megatron_core": "without megatron_config",
    "merge_weights": "of PEFT before 0.4",
    "peft_version": "the version that wrote the file",
    "qalora_group_size": "of use_qalora",
    "revision": "of the base model's repository",
    "runtime_config": "how PEFT computes",
    "task_type": "names the class of the base model",
    "use_qalora": "of GPTQ layers; elsewhere PEFT computes plain LoRA, and A of another width is refused",
    "velora_config": "of the backward pass",
}

REFUSED: Final = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing among adapters is not supported",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "replicated layers are not supported",
    "lora_bias": "biases of LoRA modules are not supported; train with lora_bias=False",
    "megatron_config": "Megatron layers are not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "trainable_token_indices": "trained single tokens are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_dora": "DoRA is not supported: convert it by peft.convert_to_lora, or train with use_dora=False",
}

PLAIN_INITIALISATIONS: Final = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Others move a part of the base weights into the adapter, which then does not fit the unchanged base model."""


def refuse_unsupported(fields: Mapping[str, object]) -> None:
    """Raise `PeftConfigRejected` for a field that changes the arithmetic in a way that is not computed here."""
    if fields.get("peft_type") != "LORA":
        raise PeftConfigRejected("peft_type", f'must be "LORA", not {shown(fields.get("peft_type"))}')
    if fields.get("init_lora_weights") not in PLAIN_INITIALISATIONS:
        raise PeftConfigRejected(
            "init_lora_weights",
            f"{shown(fields['init_lora_weights'])} changes the base weights; save plain LoRA by"
            " save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER_OF_THE_INITIAL_ADAPTER)",
        )
    for key, value in fields.items():
        if key not in USED and key not in IGNORED and value not in EMPTY:
            raise PeftConfigRejected(
                key if key in REFUSED else shown(key),
                REFUSED.get(
                    key, "is not a known field of a LoRA configuration; remove it if it changes nothing"
                ),
            )
