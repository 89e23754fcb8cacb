"""Where adapters are, and what their loads cost."""

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

ADAPTERS: Final = Dashboard(
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
