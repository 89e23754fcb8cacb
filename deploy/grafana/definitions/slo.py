"""What clients notice: failed requests, latency, and what is left of the objectives."""

from typing import Final

from deploy.grafana.definitions.panels import GENERATION, JOB, Dashboard, Panel, bad_share, quantiles, total

SLO: Final = Dashboard(
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
