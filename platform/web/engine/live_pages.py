"""The page "Live": what each engine does now, and what it did in the last hour.

Invariant: the page waits for no engine. What it does now is the newest snapshot that this gateway has; the hour is what all gateways
of the engine's host have written.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.charts import named
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.engine.queries import EngineState, engine_states
from loraplex.tenants.engine_minutes.queries import engine_minutes
from loraplex.tenants.engine_minutes.records import EngineMinute, gap_ms, ttft_ms

Operator = Annotated[PageRequest, opens_operator()]
LIVE: Final = "/operator/console/live"
MINUTE: Final = timedelta(minutes=1)
SILENT: Final = 4 * MINUTE
"""A minute that began longer ago and has none after it was an engine's last."""
SECONDS: Final = 60
TENTHS: Final = 10
SHOWN: Final = 60
"""Minutes, which have ended."""
COLUMNS: Final[Sequence[tuple[str, int, Callable[[EngineMinute], int | None]]]] = (
    ("Generated, tokens/s", TENTHS, lambda each: round(each.generation_tokens * TENTHS / SECONDS)),
    ("Prompt, tokens/s", TENTHS, lambda each: round(each.prompt_tokens * TENTHS / SECONDS)),
    ("Rows", 1, lambda each: each.running),
    ("Queue", 1, lambda each: each.waiting),
    ("KV, %", TENTHS, lambda each: round(each.referenced_blocks * 100 * TENTHS / max(each.total_blocks, 1))),
    ("On the device", 1, lambda each: each.device_adapters),
    ("In host memory", 1, lambda each: each.host_adapters),
    ("First token p50, ms", 1, lambda each: ttft_ms([each], 50)),
    ("First token p95, ms", 1, lambda each: ttft_ms([each], 95)),
    ("Between tokens p50, ms", 1, lambda each: gap_ms([each], 50)),
    ("Between tokens p95, ms", 1, lambda each: gap_ms([each], 95)),
)
"""Of the table: the head, into how many parts a unit is divided, and the number of a minute in such parts."""

router = APIRouter()


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine by its host and its address. `state` None: this gateway does not watch it. `minutes`: those of the hour it served.
    `ended_at`: the end of the last one, if no gateway has written another: an engine that starts again has another address.
    """

    host: str
    address: str
    number: int
    state: EngineState | None
    minutes: Mapping[datetime, EngineMinute]
    ended_at: datetime | None = None

    @property
    def key(self) -> str:
        """What the page's address names it by."""
        return f"{self.host} {self.address}"


@router.get(LIVE)
async def show_live(page: Operator) -> Response:
    end = datetime.now(UTC).replace(second=0, microsecond=0)
    starts = [end - back * MINUTE for back in range(1, SHOWN + 1)]
    engines = await _engines(page, starts[-1])
    asked, part = (page.http.query_params.get(name) for name in ("engine", "part"))
    engine = next((each for each in engines if each.key == asked), engines[0] if engines else None)
    hour = () if engine is None else engine.minutes.values()
    context: dict[str, Any] = {
        "engines": engines,
        "engine": engine,
        "hosts": len({each.host for each in engines}),
        "ttft": [ttft_ms(hour, percent) for percent in (50, 95)],
        "gap": [gap_ms(hour, percent) for percent in (50, 95)],
        "column_heads": COLUMNS,
        "rows": [] if engine is None else [(start, _numbers(engine.minutes.get(start))) for start in starts],
    }
    if part in ("now", "minutes"):
        return page.fragment("engine/live.html", part, **context)
    return page.show("engine/live.html", named=named, **context)


async def _engines(page: PageRequest, since: datetime) -> Sequence[LiveEngine]:
    """All engines, those of this gateway first."""
    host, now = socket.gethostname(), datetime.now(UTC)
    states = await engine_states(page.dependencies.engine, now)
    minutes = dict(await page.query(engine_minutes, since))
    own = [
        LiveEngine(host, address, each.number, each, minutes.pop((host, address), {}))
        for each in states
        for address in [each.address or ""]
    ]
    others = [
        LiveEngine(*key, found[last].number, None, found, last + MINUTE if now - last > SILENT else None)
        for key, found in sorted(minutes.items())
        for last in [max(found)]
    ]
    return [*own, *others]


def _numbers(minute: EngineMinute | None) -> Sequence[int | None]:
    """The numbers of a row; None for all of a minute that is missing."""
    return [None if minute is None else number(minute) for _, _, number in COLUMNS]
