"""Writes the dashboards: panels by their queries here, Grafana's JSON in `dashboards/`. Run it after a change: `python deploy/grafana/build.py`.

Invariant: what gateways count of their requests is summed. What they report of engines, which several of them may share, is the
largest value of each engine.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "dashboards"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
MODEL: Final = 'model_name=~"$model_name"'
JOB: Final = 'job=~"$job"'
GENERATION: Final = f'{JOB}, handler=~"/v1/(chat/)?completions"'
RATE: Final = "[$__rate_interval]"
WIDTH: Final = 24


@dataclass(frozen=True)
class Panel:
    """`queries`: legend -> expression. `kind`: a panel type of Grafana. `unit`: Grafana's id of a unit."""

    title: str
    about: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """`rows`: heading -> panels. `variables`: names of further variables -> the query of their values."""

    uid: str
    title: str
    about: str
    rows: dict[str, Sequence[Panel]]
    variables: dict[str, str]


def quantiles(family: str, labels: str = f"{JOB}, {MODEL}", by: str = "le") -> dict[str, str]:
    return {
        f"p{share}": f"histogram_quantile(0.{share}, sum by ({by}) (rate({family}_bucket{{{labels}}}{RATE})))"
        for share in (50, 95, 99)
    }


def total(family: str, labels: str = f"{JOB}, {MODEL}", by: str = "") -> str:
    """The rate of a counter over all gateways."""
    return f"sum{f' by ({by})' if by else ''} (rate({family}{{{labels}}}{RATE}))"


def of_engine(family: str, labels: str = f"{JOB}, {MODEL}", by: str = "engine") -> str:
    """The newest value of each engine, once, however many gateways report it."""
    return f"max by ({by}) ({family}{{{labels}}})"


def rate_of_engine(family: str, labels: str = f"{JOB}, {MODEL}", by: str = "engine") -> str:
    return f"max by ({by}) (rate({family}{{{labels}}}{RATE}))"


def bad_share() -> str:
    """Failed responses, and streams that failed after their first byte, among all."""
    bad = total("http_requests_total", f'{GENERATION}, status="5xx"')
    broken = total("loraplex_streams_failed_total", JOB)
    return f"({bad} + {broken}) / {total('http_requests_total', GENERATION)}"


SLO = Dashboard(
    "loraplex-slo",
    "loraplex: service level",
    "What clients notice: failed requests, and how fast tokens come.",
    {
        "Objectives": [
            Panel(
                "Error budget, 28 days",
                "What is left of 0.1 % of requests that may fail.",
                {"left": "1 - loraplex:requests_bad:ratio_rate4w / 0.001"},
                "percentunit",
                "stat",
                6,
                5,
            ),
            Panel(
                "Latency budget, 28 days",
                "What is left of 1 % of requests whose first token may take more than 2.5 s.",
                {"left": "1 - loraplex:first_token_late:ratio_rate4w / 0.01"},
                "percentunit",
                "stat",
                6,
                5,
            ),
            Panel(
                "Failed requests",
                "Share of requests now.",
                {"failed": bad_share()},
                "percentunit",
                "stat",
                6,
                5,
            ),
            Panel(
                "Requests",
                "Requests per second.",
                {"requests": total("http_requests_total", GENERATION)},
                "reqps",
                "stat",
                6,
                5,
            ),
        ],
        "Latency": [
            Panel("Time to first token", "From arrival.", quantiles("vllm:time_to_first_token_seconds"), "s"),
            Panel(
                "Time between tokens", "Of one response.", quantiles("vllm:inter_token_latency_seconds"), "s"
            ),
            Panel(
                "Whole request", "From arrival to end.", quantiles("vllm:e2e_request_latency_seconds"), "s"
            ),
        ],
        "Errors": [
            Panel(
                "Responses by class of status",
                "Of `/v1/chat/completions` and `/v1/completions`.",
                {"{{status}}": total("http_requests_total", GENERATION, "status")},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Ended requests by reason",
                "As the engine ended them.",
                {"{{finished_reason}}": total("vllm:request_success_total", by="finished_reason")},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Management and console",
                "Responses of all other routes.",
                {
                    "{{status}}": total(
                        "http_requests_total",
                        f'{JOB}, handler!~"/v1/.*|/metrics|/livez|/readyz|none"',
                        "status",
                    )
                },
                "reqps",
                stacked=True,
            ),
        ],
    },
    {},
)

SATURATION = Dashboard(
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

TOKENS = Dashboard(
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

PREFIX = Dashboard(
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

ADAPTERS = Dashboard(
    "loraplex-adapters",
    "loraplex: adapters",
    "Residency, loads and use.",
    {
        "Residency": [
            Panel(
                "Adapters by tier",
                "On the device, and in host memory.",
                {"{{tier}}, engine {{engine}}": of_engine("loraplex_adapter_residency", by="engine, tier")},
            ),
            Panel(
                "Device memory",
                "Of resident adapters, and what they may take.",
                {
                    "resident, engine {{engine}}": of_engine("loraplex_adapter_resident_bytes"),
                    "budget, engine {{engine}}": of_engine("loraplex_adapter_budget_bytes"),
                    "between pages, engine {{engine}}": of_engine("loraplex_adapter_waste_bytes"),
                },
                "bytes",
            ),
            Panel(
                "Host memory",
                "Of adapters that may come back.",
                {"engine {{engine}}": of_engine("loraplex_adapter_host_bytes")},
                "bytes",
            ),
        ],
        "Loads": [
            Panel(
                "Loads",
                "To the device, by result.",
                {"{{result}}": rate_of_engine("loraplex_adapter_loads_total", by="result")},
                "ops",
            ),
            Panel(
                "Evictions and host hits",
                "Adapters that left, and loads that found their blob in host memory.",
                {
                    "evictions": rate_of_engine("loraplex_adapter_evictions_total"),
                    "host hits": rate_of_engine("loraplex_adapter_host_hits_total"),
                },
                "ops",
            ),
            Panel(
                "Wait for a load",
                "Of requests that waited.",
                quantiles("loraplex_adapter_load_seconds", JOB),
                "s",
            ),
        ],
        "Use": [
            Panel(
                "Adapters in the batch",
                "Running, and waiting.",
                {
                    "running, engine {{engine}}": of_engine("loraplex_adapters_running"),
                    "waiting, engine {{engine}}": of_engine("loraplex_adapters_waiting"),
                    "in use, engine {{engine}}": of_engine("loraplex_adapters_pinned"),
                },
            ),
            Panel(
                "Requests by adapter",
                "The ten most used, by id; `base` is the model itself.",
                {"{{adapter}}": f"topk(10, {total('loraplex_adapter_requests_total', JOB, 'adapter')})"},
                "reqps",
            ),
            Panel(
                "Generated tokens by adapter",
                "The ten that generate most.",
                {
                    "{{adapter}}": "topk(10, "
                    + total("loraplex_adapter_tokens_total", f'{JOB}, class="completion"', "adapter")
                    + ")"
                },
            ),
            Panel(
                "Refused as poison",
                "Adapters and grammars with which engines died.",
                {"{{kind}}": total("loraplex_poison_refusals_total", by="kind")},
                "ops",
            ),
            Panel(
                "Error of 8-bit pages",
                "The greatest of a resident module.",
                {"engine {{engine}}": of_engine("loraplex_adapter_page_error")},
                "percentunit",
            ),
        ],
    },
    {},
)

TENANT = f'{JOB}, tenant=~"$tenant"'
TENANTS = Dashboard(
    "loraplex-tenants",
    "loraplex: tenants",
    "Who uses what, and whom limits refuse. Tenants are ids; those beyond the fifty most recent are `other`.",
    {
        "Requests": [
            Panel(
                "Requests",
                "The ten with most.",
                {"{{tenant}}": f"topk(10, {total('loraplex_tenant_requests_total', TENANT, 'tenant')})"},
                "reqps",
            ),
            Panel(
                "Refused by a limit",
                "The ten with most.",
                {
                    "{{tenant}}": f"topk(10, {total('loraplex_tenant_refused_requests_total', TENANT, 'tenant')})"
                },
                "reqps",
            ),
            Panel(
                "Failed in the server",
                "The ten with most.",
                {
                    "{{tenant}}": f"topk(10, {total('loraplex_tenant_failed_requests_total', TENANT, 'tenant')})"
                },
                "reqps",
            ),
        ],
        "Tokens": [
            Panel(
                title,
                "The ten with most.",
                {
                    "{{tenant}}": "topk(10, "
                    + total("loraplex_tenant_tokens_total", f'{TENANT}, class="{name}"', "tenant")
                    + ")"
                },
            )
            for title, name in (("Prompt", "prompt"), ("Cached", "cached"), ("Generated", "completion"))
        ],
        "Limits": [
            Panel(
                "Refusals by limit",
                "And the level that has it.",
                {
                    "{{limit}} of {{level}}": total(
                        "loraplex_admission_decisions_total",
                        f'{JOB}, decision=~"rate_limited|exhausted"',
                        "limit, level",
                    )
                },
                "reqps",
                width=12,
            ),
            Panel(
                "Reserved and used",
                "Tokens per second: reservations that are much larger than the use refuse too early.",
                {
                    "reserved": total("loraplex_admission_reserved_tokens_total", JOB),
                    "used": total("loraplex_admission_used_tokens_total", JOB),
                },
                width=12,
            ),
        ],
    },
    {"tenant": f"label_values(loraplex_tenant_requests_total{{{JOB}}}, tenant)"},
)

DEPENDENCIES = Dashboard(
    "loraplex-dependencies",
    "loraplex: dependencies",
    "PostgreSQL, Valkey, the journal between them, and what leaves the installation.",
    {
        "Stores": [
            Panel(
                "Up",
                "As gateways see them: 1 is up.",
                {"{{dependency}}, {{instance}}": f"loraplex_dependency_up{{{JOB}}}"},
            ),
            Panel(
                "Without Valkey",
                "Gateways that admit by their share of the limits, and requests so admitted.",
                {
                    "{{instance}}": f"loraplex_admission_degraded{{{JOB}}}",
                    "requests per second": total("loraplex_admission_degraded_requests_total", JOB),
                },
            ),
            Panel(
                "Settlement",
                "Writing the usage of a request.",
                quantiles("loraplex_admission_settle_seconds", JOB),
                "s",
            ),
        ],
        "Journal": [
            Panel(
                "Waits for PostgreSQL",
                "Records that are not shipped yet.",
                {"{{instance}}": f"loraplex_journal_records{{{JOB}}}"},
            ),
            Panel(
                "Age of the oldest record",
                "It grows while PostgreSQL is away.",
                {"{{instance}}": f"loraplex_journal_oldest_seconds{{{JOB}}}"},
                "s",
            ),
            Panel(
                "Size, and rejected records",
                "Of the file; rejected records need a person.",
                {
                    "bytes, {{instance}}": f"loraplex_journal_bytes{{{JOB}}}",
                    "rejected, {{instance}}": f"loraplex_journal_dead_letters{{{JOB}}}",
                },
                "bytes",
            ),
            Panel(
                "Commits",
                "One transaction of the journal.",
                quantiles("loraplex_journal_commit_seconds", JOB),
                "s",
            ),
        ],
        "Money and events": [
            Panel(
                "Drift of billing",
                "Sums that differ from the ledger's rows. It should be 0.",
                {"{{compared}}": f"max by (compared) (loraplex_billing_differences{{{JOB}}})"},
            ),
            Panel(
                "Webhooks",
                "Attempts by result.",
                {"{{result}}": total("loraplex_webhook_deliveries_total", JOB, "result")},
                "ops",
            ),
            Panel(
                "Oldest of what waits",
                "Events, and meter events.",
                {
                    "events": f"max(loraplex_outbox_oldest_seconds{{{JOB}}})",
                    "meter events": f"max(loraplex_meter_export_oldest_seconds{{{JOB}}})",
                    "prices": f"max(loraplex_price_age_seconds{{{JOB}}})",
                },
                "s",
            ),
        ],
    },
    {},
)

PROCESS = Dashboard(
    "loraplex-process",
    "loraplex: processes",
    "Gateways and engines as processes.",
    {
        "Gateways": [
            Panel(
                "Memory", "Resident.", {"{{instance}}": f"process_resident_memory_bytes{{{JOB}}}"}, "bytes"
            ),
            Panel(
                "CPU",
                "Cores in use.",
                {"{{instance}}": f"rate(process_cpu_seconds_total{{{JOB}}}{RATE})"},
            ),
            Panel(
                "Open files",
                "And how many may be open.",
                {
                    "{{instance}}": f"process_open_fds{{{JOB}}}",
                    "limit, {{instance}}": f"process_max_fds{{{JOB}}}",
                },
            ),
            Panel("Tasks", "Of the event loop.", {"{{instance}}": f"loraplex_asyncio_tasks{{{JOB}}}"}),
            Panel(
                "Uptime",
                "Since the start of the gateway.",
                {"{{instance}}": f"time() - process_start_time_seconds{{{JOB}}}"},
                "s",
            ),
            Panel(
                "Versions",
                "Gateways by version.",
                {"{{version}}": f"count by (version) (loraplex_build_info{{{JOB}}})"},
                kind="stat",
            ),
        ],
        "Engines": [
            Panel("Up", "1 while it answers.", {"engine {{engine}}": of_engine("loraplex_engine_up")}),
            Panel(
                "Restarts",
                "After a crash or a hang, in an hour.",
                {
                    "engine {{engine}}": "max by (engine) (increase("
                    f"loraplex_engine_restarts_total{{{JOB}, {MODEL}}}[1h]))"
                },
            ),
            Panel(
                "Silence",
                "Since a gateway heard of it, and since its last step with work.",
                {
                    "heard, engine {{engine}}": of_engine("loraplex_engine_heartbeat_age_seconds"),
                    "step, engine {{engine}}": of_engine("loraplex_engine_step_age_seconds"),
                },
                "s",
            ),
            Panel(
                "Steps",
                "Per second.",
                {"engine {{engine}}": rate_of_engine("loraplex_engine_steps_total")},
                "ops",
            ),
            Panel(
                "Time of a step",
                "Mean.",
                {
                    "engine {{engine}}": f"{rate_of_engine('loraplex_engine_step_seconds_total')}"
                    f" / {rate_of_engine('loraplex_engine_steps_total')}"
                },
                "s",
            ),
            Panel(
                "Corrupted requests",
                "Those with non-finite logits, in an hour.",
                {
                    "engine {{engine}}": "max by (engine) (increase("
                    f"vllm:corrupted_requests_total{{{JOB}, {MODEL}}}[1h]))"
                },
            ),
        ],
    },
    {},
)

DASHBOARDS: Final = (SLO, SATURATION, TOKENS, PREFIX, ADAPTERS, TENANTS, DEPENDENCIES, PROCESS)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's JSON of a dashboard."""
    queries = {
        "job": "label_values(loraplex_build_info, job)",
        "model_name": f"label_values(vllm:num_requests_running{{{JOB}}}, model_name)",
        **dashboard.variables,
    }
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["loraplex"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {
                "title": "loraplex",
                "type": "dashboards",
                "tags": ["loraplex"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                *(variable(name, query) for name, query in queries.items()),
            ]
        },
        "panels": [*panels(dashboard)],
    }


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, each with its panels from left to right."""
    number, y = 1, 0
    for heading, found in dashboard.rows.items():
        yield {"id": number, "type": "row", "title": heading, "gridPos": place(WIDTH, 1, 0, y), "panels": []}
        number, y, x, line = number + 1, y + 1, 0, 0
        for each in found:
            if x + each.width > WIDTH:
                y, x, line = y + line, 0, 0
            yield panel(number, each, place(each.width, each.height, x, y))
            number, x, line = number + 1, x + each.width, max(line, each.height)
        y += line


def panel(number: int, shown: Panel, grid: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": shown.unit}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if shown.kind == "timeseries":
        stacking = {"mode": "normal" if shown.stacked else "none"}
        defaults |= {
            "min": 0,
            "custom": {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "stacking": stacking},
        }
        options = {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["mean", "max", "lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": shown.kind,
        "title": shown.title,
        "description": shown.about,
        "datasource": DATASOURCE,
        "gridPos": grid,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (legend, query) in enumerate(shown.queries.items())
        ],
    }


def place(width: int, height: int, x: int, y: int) -> dict[str, int]:
    return {"w": width, "h": height, "x": x, "y": y}


def main() -> None:
    for dashboard in DASHBOARDS:
        text = json.dumps(document(dashboard), indent=2, ensure_ascii=False)
        (FOLDER / f"{dashboard.uid.removeprefix('loraplex-')}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
