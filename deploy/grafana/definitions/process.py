"""The processes of gateways and engines."""

from typing import Final

from deploy.grafana.definitions.panels import JOB, MODEL, RATE, Dashboard, Panel, of_engine, rate_of_engine

PROCESS: Final = Dashboard(
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
                "Slowness",
                "Times as long as its fellows an engine takes, and the part of its requests that it gets.",
                {
                    "slowness, engine {{engine}}": of_engine("loraplex_engine_slowness"),
                    "share, engine {{engine}}": of_engine("loraplex_engine_share"),
                },
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
