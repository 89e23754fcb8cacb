"""What the prefix cache saves."""

from typing import Final

from deploy.grafana.definitions.panels import Dashboard, Panel, of_engine, rate_of_engine

PREFIX_CACHE: Final = Dashboard(
    "loraplex-prefix-cache",
    "loraplex: prefix cache",
    "How much of the prompts is not computed again.",
    {
        "Hits": [
            Panel(
                "Hit ratio",
                "Tokens found among those looked up.",
                {
                    "engine {{engine}}": f"{rate_of_engine('vllm:prefix_cache_hits_total')}"
                    f" / {rate_of_engine('vllm:prefix_cache_queries_total')}"
                },
                "percentunit",
                width=12,
            ),
            Panel(
                "Tokens looked up and found",
                "Per second.",
                {
                    "looked up, engine {{engine}}": rate_of_engine("vllm:prefix_cache_queries_total"),
                    "found, engine {{engine}}": rate_of_engine("vllm:prefix_cache_hits_total"),
                },
                width=12,
            ),
            Panel(
                "Cached prompt tokens",
                "Share of the prompts' tokens.",
                {
                    "engine {{engine}}": f"{rate_of_engine('vllm:prompt_tokens_cached_total')}"
                    f" / {rate_of_engine('vllm:prompt_tokens_total')}"
                },
                "percentunit",
                width=12,
            ),
            Panel(
                "KV blocks",
                "Empty, kept for reuse, and in use.",
                {
                    "empty, engine {{engine}}": of_engine("loraplex_kv_blocks_free"),
                    "kept, engine {{engine}}": of_engine("loraplex_kv_blocks_cached"),
                    "in use, engine {{engine}}": of_engine("loraplex_kv_blocks_referenced"),
                },
                width=12,
                stacked=True,
            ),
        ]
    },
    {},
)
