"""How each key of a PEFT LoRA configuration is treated: read, harmless, or refused by name with the reason.

A key that is in none of these tables is refused unless it is empty, since it may change what the adapter computes.
"""

READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    }
)

HARMLESS = frozenset(
    {
        "base_model_name_or_path",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)

REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "Arrow routing among adapters is not supported",
    "auto_mapping": "custom base classes are not supported",
    "corda_config": "CorDA changes the base weights; convert the adapter to plain LoRA before saving it",
    "ensure_weight_tying": "tied adapters are not supported",
    "fan_in_fan_out": "must be false: the base model has no Conv1D",
    "kasa_config": "KaSA is not supported",
    "layer_replication": "replicated layers are not supported",
    "loftq_config": "LoftQ changes the base weights; convert the adapter to plain LoRA before saving it",
    "lora_bias": "biases of LoRA modules are not supported",
    "lora_ga_config": "LoRA-GA changes the base weights; convert the adapter to plain LoRA before saving it",
    "megatron_config": "Megatron layers are not supported",
    "modules_to_save": "whole trained modules are not supported, only low-rank ones",
    "monteclora_config": "MonteCLoRA is not supported",
    "target_parameters": "adapters on bare parameters are not supported",
    "trainable_token_indices": "trained single tokens are not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "use_dora": "DoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "velora_config": "VeLoRA is not supported",
}

# Other initialisations move a part of the base weights into the adapter, which then fits no unchanged base model.
PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
