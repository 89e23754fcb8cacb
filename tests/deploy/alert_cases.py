"""What makes each alert fire, as a table: a moment before it does, and one when it must. Alerts whose cases need more are in
`alert_cases.yml`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
RULES: Final = [DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
CASES: Final = Path(__file__).parent / "alert_cases.yml"
FAILED: Final = 'http_requests_total{handler="/v1/completions", status="5xx"}'
SUCCEEDED: Final = 'http_requests_total{handler="/v1/completions", status="2xx"}'
LATE: Final = 'vllm:time_to_first_token_seconds_bucket{le="2.5"}'
FIRST: Final = "vllm:time_to_first_token_seconds_count"
# One of five requests fails, or comes late.
FAILING: Final = {SUCCEEDED: "0+8x250", FAILED: "0+2x250", "loraplex_streams_failed_total": "0x250"}
SLOW: Final = {FIRST: "0+10x250", LATE: "0+8x250"}
BURNS: Final = {
    "VeryFast": (1, 10, "2 % of the month's budget in an hour"),
    "Fast": (10, 30, "5 % of the month's budget in six hours"),
    "Slowly": (50, 80, "10 % of the month's budget in a day"),
    "VerySlowly": (170, 200, "10 % of the month's budget in three days"),
}
"""A minute before its alert has waited long enough, one after, and what burns."""


@dataclass(frozen=True)
class AlertCase:
    """An alert that `series`, a sample each minute, cause. `quiet` and `fires`: minutes. `description`: as a person gets it."""

    alert: str
    series: Mapping[str, str]
    quiet: int
    fires: int
    description: str
    labels: Mapping[str, str] = field(default_factory=dict)


ENGINE: Final = {"engine": "1"}
GATEWAY: Final = {"instance": "b"}
TABLE: Final = (
    *(
        AlertCase(f"Loraplex{name}{speed}", series, quiet, fires, f"20% of {what}, which takes {budget}.")
        for name, what, series in (
            ("RequestsFail", "requests fail", FAILING),
            ("FirstTokensLate", "first tokens take more than 2.5 s", SLOW),
        )
        for speed, (quiet, fires, budget) in BURNS.items()
    ),
    AlertCase(
        "LoraplexEngineDown",
        {'loraplex_engine_up{engine="0"}': "1x20", 'loraplex_engine_up{engine="1"}': "1x5 0x15"},
        5,
        8,
        "Engine 1: requests wait for it, or go to others. Its log says why.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexEngineSilent",
        {'loraplex_engine_heartbeat_age_seconds{engine="1"}': "1x5 45x15"},
        5,
        8,
        "Engine 1 was last heard 45s ago.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexEngineStalled",
        {'loraplex_engine_step_age_seconds{engine="1"}': "0x5 90x15"},
        5,
        8,
        "Engine 1: its last step ended 1m 30s ago. It is restarted after 120 s.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexEngineSlow",
        {
            'loraplex_engine_slowness{engine="0"}': "1x20",
            'loraplex_engine_slowness{engine="1"}': "1x5 3.1x15",
            'loraplex_engine_share{engine="0"}': "1x20",
            'loraplex_engine_share{engine="1"}': "1x7 0.25x15",
        },
        7,
        10,
        "Engine 1 takes 3.1 times as long, and gets fewer requests until it has recovered.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexEnginePoisoned",
        {'loraplex_poison_refusals_total{kind="adapter"}': "0x5 3x25"},
        5,
        8,
        "Requests with it are refused, by adapter.",
        {"kind": "adapter"},
    ),
    AlertCase(
        "LoraplexCorruptedRequests",
        {'vllm:corrupted_requests_total{engine="1"}': "0x30 15x3"},
        29,
        31,
        "Engine 1: 15 requests in 15 minutes. An adapter that causes it three times is quarantined; "
        "without an adapter suspect the hardware.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexEngineRefuses",
        {'vllm:admission_rejections_total{engine="1"}': "0x5 0+60x30"},
        8,
        20,
        "Engine 1 refuses 1 requests a second with 503.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexQueueSlow",
        {
            'loraplex_request_queue_seconds_bucket{le="5"}': "0+10x9 100+0x40",
            'loraplex_request_queue_seconds_bucket{le="10"}': "0+10x9 100+10x40",
            'loraplex_request_queue_seconds_bucket{le="+Inf"}': "0+10x9 100+10x40",
        },
        9,
        40,
        "95 % of them wait less than 9.75s; more waits than that follow.",
    ),
    AlertCase(
        "LoraplexAdapterLoadsFail",
        {'loraplex_adapter_loads_total{engine="1", result="failed"}': "0x5 0+1x30"},
        10,
        25,
        "Engine 1. The storage of adapters, or files that changed after their validation.",
        ENGINE,
    ),
    AlertCase(
        "LoraplexWithoutCounters",
        {
            'loraplex_admission_degraded{instance="a"}': "0x30",
            'loraplex_admission_degraded{instance="b"}': "0x5 1x25",
        },
        8,
        15,
        "b admits by its share of the limits, and refuses what has a budget.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexJournalWaits",
        {'loraplex_journal_oldest_seconds{instance="b"}': "2x5 400x25"},
        8,
        15,
        "The oldest record of b is 6m 40s old. When the journal is full, requests get 507.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexJournalGrows",
        {'loraplex_journal_records{instance="b"}': "0x5 8000+1000x40"},
        10,
        35,
        "b settles faster than PostgreSQL takes it.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexJournalFull",
        {'loraplex_journal_full{instance="b"}': "0x5 1x5"},
        5,
        7,
        "b refuses new requests with 507 until PostgreSQL has taken its records.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexJournalRejected",
        {'loraplex_journal_dead_letters{instance="b"}': "0x5 2x5"},
        5,
        7,
        "2 records of b are kept apart: usage that is not billed.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexBillingDrift",
        {'loraplex_billing_differences{compared="hours"}': "0x5 4x30"},
        15,
        25,
        "4 sums of hours. Nothing is billed wrongly before a month is closed: see the log.",
        {"compared": "hours"},
    ),
    AlertCase(
        "LoraplexPricesOld",
        {'loraplex_price_age_seconds{instance="b"}': "60x5 900x15"},
        8,
        15,
        "b compared them 15m 0s ago.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexWebhooksLate",
        {"loraplex_outbox_oldest_seconds": "10x5 4000x30"},
        15,
        25,
        "The oldest waits since 1h 6m 40s.",
    ),
    AlertCase(
        "LoraplexMeterExportLate",
        {"loraplex_meter_export_oldest_seconds": "10x5 8000x30"},
        15,
        25,
        "The oldest waits since 2h 13m 20s.",
    ),
    AlertCase(
        "LoraplexConnectionsRefused",
        {'loraplex_http_connections_refused_total{bound="address"}': "0x5 0+300x30"},
        10,
        25,
        "By the bound address: a flood, or `max_connections` is too low.",
        {"bound": "address"},
    ),
    AlertCase(
        "LoraplexFilesRunOut",
        {
            'process_open_fds{instance="b"}': "100x5 950x15",
            'process_max_fds{instance="b"}': "1000x20",
        },
        8,
        15,
        "b uses 95% of them.",
        GATEWAY,
    ),
    AlertCase(
        "LoraplexGatewayAbsent",
        {"loraplex_build_info": "1x5 _x20"},
        8,
        15,
        "Prometheus has not reached any of them for two minutes.",
    ),
)


def uncovered(alerts: Iterable[str]) -> set[str]:
    """Alerts that no case lets fire."""
    covered = {case.alert for case in TABLE}
    for each in yaml.safe_load(CASES.read_text())["tests"]:
        covered |= {test["alertname"] for test in each.get("alert_rule_test", ()) if test["exp_alerts"]}
    return set(alerts) - covered


def document(rules: Iterable[Mapping[str, Any]]) -> str:
    """The table as a file for `promtool test rules`; severities and summaries are those of `rules`."""
    known = {rule["alert"]: rule for rule in rules if "alert" in rule}
    table = yaml.safe_dump(
        {
            "rule_files": [str(path) for path in RULES],
            "evaluation_interval": "1m",
            "tests": [_test(case, known[case.alert]) for case in TABLE],
        }
    )
    return str(table)


def _test(case: AlertCase, rule: Mapping[str, Any]) -> dict[str, Any]:
    fired = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {
            "summary": rule["annotations"]["summary"],
            "description": case.description,
        },
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{at}m", "alertname": case.alert, "exp_alerts": expected}
            for at, expected in ((case.quiet, []), (case.fires, [fired]))
        ],
    }
