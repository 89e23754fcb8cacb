"""PostgreSQL, Valkey, journal and webhooks, as gateways see them."""

from typing import Final

from deploy.grafana.definitions.panels import JOB, Dashboard, Panel, quantiles, total

DEPENDENCIES: Final = Dashboard(
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
