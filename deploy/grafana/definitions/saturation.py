"""Whether engines have room: batch, queue, KV cache, preemptions, steps."""

from typing import Final

from deploy.grafana.definitions.panels import (
    JOB,
    Dashboard,
    Panel,
    of_engine,
    quantiles,
    rate_of_engine,
    total,
)

SATURATION: Final = Dashboard(
    "loraplex-saturation",
    "loraplex: saturation",
    "What is full, and what waits for what.",
    {
        "Engine": [
            Panel(
                "Running",
                "Requests in the batch.",
                {"engine {{engine}}": of_engine("vllm:num_requests_running")},
            ),
            Panel(
                "Waiting, by reason",
                "Deferred requests wait for an adapter or a grammar.",
                {"{{reason}}": of_engine("vllm:num_requests_waiting_by_reason", by="reason")},
                stacked=True,
            ),
            Panel(
                "KV cache in use",
                "High is normal; with preemptions it is too small.",
                {"engine {{engine}}": of_engine("vllm:kv_cache_usage_perc")},
                "percentunit",
            ),
            Panel(
                "Preemptions",
                "Rows computed again because the KV cache was full.",
                {"engine {{engine}}": rate_of_engine("vllm:num_preemptions_total")},
                "ops",
            ),
            Panel(
                "Refused by the engine",
                "Its queue was full.",
                {"{{reason}}": rate_of_engine("vllm:admission_rejections_total", by="reason")},
                "reqps",
            ),
            Panel(
                "Tokens per step",
                "How well the batch is filled.",
                quantiles("vllm:iteration_tokens_total", by="le"),
            ),
            Panel(
                "Share of the memory's rate",
                "What steps read, over what the device can read meanwhile. Near 1 decoding is at its limit.",
                {
                    "engine {{engine}} {{part}}": f"{rate_of_engine('loraplex_step_bytes_total', by='engine, part')}"
                    f" / on (engine) group_left () ({rate_of_engine('loraplex_engine_step_seconds_total')}"
                    f" * {of_engine('loraplex_memory_rate_bytes')})"
                },
                "percentunit",
                stacked=True,
            ),
        ],
        "Queues": [
            Panel("Queue", "Receipt to first step.", quantiles("loraplex_request_queue_seconds", JOB), "s"),
            Panel(
                "Prefill", "First step to first token.", quantiles("vllm:request_prefill_time_seconds"), "s"
            ),
            Panel("Decode", "First to last token.", quantiles("vllm:request_decode_time_seconds"), "s"),
            Panel("Admission", "Asking the counters.", quantiles("loraplex_admission_seconds", JOB), "s"),
            Panel(
                "Schema checks",
                "Waiting for a compile check.",
                quantiles("loraplex_grammar_trial_seconds", JOB),
                "s",
            ),
            Panel(
                "Grammars in the engine",
                "Requests that wait for a grammar, and rows that missed a step for a mask.",
                {
                    "waiting": of_engine("loraplex_requests_waiting_for_grammar"),
                    "late masks per second": rate_of_engine("loraplex_grammar_late_masks_total"),
                },
            ),
        ],
        "Gateways": [
            Panel(
                "Connections",
                "Open, by gateway.",
                {"{{instance}}": f"loraplex_http_connections{{{JOB}}}"},
            ),
            Panel(
                "Refused connections",
                "By the bound that refused them.",
                {"{{bound}}": total("loraplex_http_connections_refused_total", JOB, "bound")},
                "ops",
            ),
            Panel(
                "Decisions of admission",
                "By decision and limit.",
                {
                    "{{decision}} {{limit}}": total(
                        "loraplex_admission_decisions_total", JOB, "decision, limit"
                    )
                },
                "reqps",
                stacked=True,
            ),
        ],
    },
    {},
)
