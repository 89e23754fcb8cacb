"""Panels and dashboards by their queries, and the expressions that most queries are made of.

Invariant: what gateways count of their requests is summed. What they report of engines, which several of them may share, is the
largest value of each engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MODEL: Final = 'model_name=~"$model_name"'
JOB: Final = 'job=~"$job"'
GENERATION: Final = f'{JOB}, handler=~"/v1/(chat/)?completions"'
RATE: Final = "[$__rate_interval]"


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
