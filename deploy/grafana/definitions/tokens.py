"""How many tokens go in, come out, and come from the cache."""

from typing import Final

from deploy.grafana.definitions.panels import Dashboard, Panel, quantiles, rate_of_engine, total

TOKENS: Final = Dashboard(
    "loraplex-tokens",
    "loraplex: tokens",
    "What is computed, found and generated.",
    {
        "Rates": [
            Panel(
                "Tokens per second",
                "As clients are charged: cached tokens are a part of the prompts.",
                {
                    "prompt": total("vllm:request_prompt_tokens_sum"),
                    "computed": total("vllm:request_prefill_kv_computed_tokens_sum"),
                    "generated": total("vllm:request_generation_tokens_sum"),
                },
                width=12,
            ),
            Panel(
                "Prompt tokens by source",
                "As engines count them.",
                {"{{source}}": rate_of_engine("vllm:prompt_tokens_by_source_total", by="source")},
                width=12,
                stacked=True,
            ),
            Panel(
                "Engine tokens",
                "Processed and generated, by engine.",
                {
                    "prompt, engine {{engine}}": rate_of_engine("vllm:prompt_tokens_total"),
                    "generated, engine {{engine}}": rate_of_engine("vllm:generation_tokens_total"),
                },
                width=12,
            ),
            Panel(
                "Forced by grammars",
                "Tokens that were the only ones allowed.",
                {"engine {{engine}}": rate_of_engine("loraplex_grammar_forced_tokens_total")},
                width=12,
            ),
        ],
        "Sizes of requests": [
            Panel("Prompts", "Tokens.", quantiles("vllm:request_prompt_tokens")),
            Panel("Responses", "Tokens.", quantiles("vllm:request_generation_tokens")),
            Panel("Longest choice", "Tokens.", quantiles("vllm:request_max_num_generation_tokens")),
            Panel("Asked for", "`max_tokens`.", quantiles("vllm:request_params_max_tokens")),
            Panel("Choices", "`n`.", quantiles("vllm:request_params_n")),
            Panel(
                "Time per token after the first",
                "Mean of a request.",
                quantiles("vllm:request_time_per_output_token_seconds"),
                "s",
            ),
        ],
    },
    {},
)
