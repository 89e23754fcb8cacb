"""Writes the dashboards in `definitions/` as Grafana's JSON in `dashboards/`. Run it after a change: `python -m deploy.grafana.build`.

Invariant: the files are a function of the definitions alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from deploy.grafana.definitions.adapters import ADAPTERS
from deploy.grafana.definitions.dependencies import DEPENDENCIES
from deploy.grafana.definitions.panels import JOB, Dashboard, Panel
from deploy.grafana.definitions.prefix_cache import PREFIX_CACHE
from deploy.grafana.definitions.process import PROCESS
from deploy.grafana.definitions.saturation import SATURATION
from deploy.grafana.definitions.slo import SLO
from deploy.grafana.definitions.tenants import TENANTS
from deploy.grafana.definitions.tokens import TOKENS

FOLDER: Final = Path(__file__).parent / "dashboards"
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24
DASHBOARDS: Final = (SLO, SATURATION, TOKENS, PREFIX_CACHE, ADAPTERS, TENANTS, DEPENDENCIES, PROCESS)


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
