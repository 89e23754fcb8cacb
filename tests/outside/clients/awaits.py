"""What is refused today: variants by name, recorded requests by a member of theirs. What is served has to leave this list."""

AWAITS: frozenset[str] = frozenset(
    (
        # fields that are checked and not used
        *("safety_identifier", "verbosity", "modalities", "prompt_cache_retention", "prompt_cache_options"),
        *("include_obfuscation", "prompt_cache_breakpoint"),
        # histories
        *("reasoning_content", "reasoning", "provider_specific_fields", "refusal", "cache_control"),
        "tool_call_provider_specific_fields",
        # other names and values of what there is
        *("both_limits_on_completions", "max_completion_tokens_on_completions", "continuous_usage_stats"),
        *("structural_tag", "json_object_schema", "top_p_zero", "empty_user", "empty_stop"),
        # a schema beside the type "json_object", as huggingface_hub writes it
        "value",
        # templates and tokens
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "return_token_ids"),
        *("return_tokens_as_token_ids", "tokenize_options", "tokenize_chat_options", "detokenize"),
        # scores
        *("echo", "prompt_logprobs", "probabilities"),
        # HTTP
        *("trailing_slash", "gzip"),
    )
)
