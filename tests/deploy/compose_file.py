"""`deploy/compose.yaml` as Compose reads it: variables interpolated, anchors merged."""

import re
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
VARIABLE: Final = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolated(name: str, **variables: str) -> str:
    """The file's text. A variable without a default must be among `variables`."""

    def value(match: re.Match[str]) -> str:
        if match[1] in variables:
            return variables[match[1]]
        assert match[2] == "-", f"{match[1]} is required"
        return match[3]

    text = (DEPLOY / name).read_text()
    return VARIABLE.sub(value, re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))


def services() -> dict[str, Any]:
    """The services of `compose.yaml`, served model `tiny`."""
    found: dict[str, Any] = yaml.safe_load(interpolated("compose.yaml", LORAPLEX_MODEL="/models/tiny"))[
        "services"
    ]
    return found


def seconds(duration: str) -> float:
    """A duration such as 60s or 30m."""
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]
