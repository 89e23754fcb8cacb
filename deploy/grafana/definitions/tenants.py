"""Who uses what, and whom limits refuse."""

from typing import Final

from deploy.grafana.definitions.panels import JOB, Dashboard, Panel, total

TENANT: Final = f'{JOB}, tenant=~"$tenant"'
TENANTS: Final = Dashboard(
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
