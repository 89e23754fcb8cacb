"""The page "Live": what each engine does now, and what it did in the last hour.

Invariant: the page waits for no engine. What it does now is the newest snapshot that this gateway has; the hour is what all gateways
of the engine's host have written.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.charts import ChartRow, named
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.engine.queries import EngineState, engine_states
from loraplex.tenants.engine_minutes.queries import engine_minutes
from loraplex.tenants.engine_minutes.records import EngineMinute, gap_ms, ttft_ms

Operator = Annotated[PageRequest, opens_operator()]
LIVE: Final = "/operator/console/live"
MINUTE: Final = timedelta(minutes=1)
SHOWN: Final = 60
"""Minutes, which have ended."""
COLUMNS: Final = (
    "Generated, tokens/s",
    "Prompt, tokens/s",
    "Rows",
    "Queue",
    "KV, %",
    "On the device",
    "In host memory",
    "First token p50, ms",
    "First token p95, ms",
    "Between tokens p50, ms",
    "Between tokens p95, ms",
)

router = APIRouter()


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine by its host and its address. `state` None: this gateway does not watch it. `minutes`: those of the hour it served."""

    host: str
    number: int
    state: EngineState | None
    minutes: Mapping[datetime, EngineMinute]

    @property
    def key(self) -> str:
        """What the page's address names it by."""
        return f"{self.number}@{self.host}"

    def ttft_ms(self, percent: int) -> int | None:
        """Of the hour."""
        return ttft_ms(self.minutes.values(), percent)

    def gap_ms(self, percent: int) -> int | None:
        """Of the hour."""
        return gap_ms(self.minutes.values(), percent)


@router.get(LIVE)
async def show_live(page: Operator) -> Response:
    now = datetime.now(UTC)
    engines = await _engines(page, now - SHOWN * MINUTE)
    asked, part = (page.http.query_params.get(name) for name in ("engine", "part"))
    engine = next((each for each in engines if each.key == asked), engines[0] if engines else None)
    context: dict[str, Any] = {
        "engines": engines,
        "engine": engine,
        "hosts": len({each.host for each in engines}),
        "model": page.dependencies.engine.info(),
        "column_names": COLUMNS,
        "rows": () if engine is None else _rows(engine, now),
    }
    if part in ("now", "minutes"):
        return page.fragment("engine/live.html", part, **context)
    return page.show("engine/live.html", named=named, **context)


async def _engines(page: PageRequest, since: datetime) -> Sequence[LiveEngine]:
    """All engines, those of this gateway first."""
    host, states = socket.gethostname(), await engine_states(page.dependencies.engine, datetime.now(UTC))
    minutes = dict(await page.query(engine_minutes, since))
    own = [
        LiveEngine(host, each.number, each, minutes.pop((host, each.address or ""), {})) for each in states
    ]
    others = [
        LiveEngine(of_host, newest.number, None, found)
        for (of_host, _), found in sorted(minutes.items())
        for newest in [found[max(found)]]
    ]
    return [*own, *others]


def _rows(engine: LiveEngine, now: datetime) -> list[ChartRow]:
    """A row of the table for each minute that has ended, the newest first."""
    end = now.replace(second=0, microsecond=0)
    starts = [end - back * MINUTE for back in range(1, SHOWN + 1)]
    return [ChartRow(start, _values(engine.minutes.get(start)), goes_on=False) for start in starts]


def _values(minute: EngineMinute | None) -> tuple[int | None, ...]:
    """The columns of the table, in their order."""
    if minute is None:
        return (None,) * len(COLUMNS)
    of = [minute]
    return (
        round(minute.generation_tokens / MINUTE.total_seconds()),
        round(minute.prompt_tokens / MINUTE.total_seconds()),
        minute.running,
        minute.waiting,
        minute.kv_percent,
        minute.device_adapters,
        minute.host_adapters,
        ttft_ms(of, 50),
        ttft_ms(of, 95),
        gap_ms(of, 50),
        gap_ms(of, 95),
    )
