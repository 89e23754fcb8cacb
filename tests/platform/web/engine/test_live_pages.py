"""The page "Live": without a minute, with some, an engine of another server, and the parts that htmx reads again."""

import socket
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from tests.platform.engines.managed_engine import Managed
from tests.platform.web.browser import Console, SignedIn
from tests.platform.web.engine.test_operator_pages import given

from loraplex.engine.messages import EngineStats, TenantSteps
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.jobs.engine_minutes import EngineMinuteWriter
from loraplex.platform.observability.engine_minutes import EngineMinutes
from loraplex.tenants.engine_minutes.queries import engine_minutes
from loraplex.tenants.engine_minutes.records import EngineMinute
from loraplex.tenants.engine_minutes.use_cases import keep

LIVE = "/operator/console/live"


def minute(back: int, **given: Any) -> EngineMinute:
    """The minute that ended `back` minutes before the current one began."""
    at = datetime.now(UTC).replace(second=0, microsecond=0) - (back + 1) * timedelta(minutes=1)
    zeros = dict.fromkeys(
        (name for name in EngineMinute.model_fields if name.endswith(("_tokens", "ing"))), 0
    )
    zeros |= dict.fromkeys(("referenced_blocks", "total_blocks", "device_adapters", "host_adapters"), 0)
    own = {"minute": at, "gateway": uuid4(), "number": 0, "host": socket.gethostname(), "address": ""}
    return EngineMinute.model_validate(zeros | own | given)


async def test_it_shows_now_and_the_last_hour(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("operator")
    empty = await browser.page(LIVE)
    assert empty.texts("h2")[0] == "Engine 0" and len(empty.all("#t-minutes tbody tr")) == 60
    assert not empty.all("#t-minutes td[data-v]") and len(empty.all("figure[data-columns]")) == 6
    busy = Managed()
    busy.known_at = datetime.now(UTC)
    busy.last_stats = busy.known_stats = EngineStats(
        running=3,
        max_running=64,
        waiting=9,
        total_blocks=10,
        referenced_blocks=4,
        tenant_steps=[TenantSteps(b"t", 600, 1200, 0)],
    )
    given(console, engine=EnginePool([busy]))
    async with console.database.as_operator() as session:
        buckets = (0,) * 5 + (4,) + (0,) * 10
        own = {"address": busy.address, "generation_tokens": 3000, "ttft_buckets": buckets}
        await keep(session, [minute(0, **own), minute(2, **own), minute(70, **own)])
        await keep(session, [minute(1, host="other", address="ipc:///x", number=4, running=2)])
        await keep(session, [last := minute(9, host="other", address="ipc:///y", number=4)])
    page = await browser.page(LIVE)
    figures = dict(zip(page.texts(".stat dt"), page.texts(".stat dd.value"), strict=True))
    assert (
        figures["Generated"] == "20.0 tokens/s"
        and figures["Rows"] == "3"
        and figures["KV in use"] == "40.0 %"
    )
    assert figures["First token, median"] == "200 ms" and figures["Between tokens, median"] == "–"
    values = [each.attributes["data-v"] for each in page.all("#t-minutes tbody tr")[0].css("td[data-v]")]
    assert values[0] == "500" and len(page.all("#t-minutes td[data-v]")) == 2 * 9
    assert page.texts("nav.seg a")[1] == "Engine 4 on other"
    other = await browser.page(f"{LIVE}?engine=other+ipc%3A%2F%2F%2Fx")
    assert other.texts("h2")[0] == "Engine 4 on other" and "Another server watches" in other.text
    stopped = await browser.page(f"{LIVE}?engine=other+ipc%3A%2F%2F%2Fy")
    until = f"{last.minute + timedelta(minutes=1):%H:%M}"
    assert stopped.texts("h2")[0] == f"Engine 4 on other, until {until}" and "stopped or" in stopped.text
    now = await browser.get(f"{LIVE}?part=now", **{"hx-request": "true"})
    assert now.text.lstrip().startswith('<section class="section" id="now"')
    rows = await browser.get(f"{LIVE}?part=minutes", **{"hx-request": "true"})
    assert rows.text.lstrip().startswith("<tbody")
    assert (await (await signed_in("admin")).get(LIVE)).status_code == 303


async def test_the_writer_keeps_what_has_ended(console: Console) -> None:
    watched = Managed()
    watched.last_stats = EngineStats(running=2)
    minutes = EngineMinutes(EnginePool([watched]), uuid4())
    minutes.sample(datetime.now(UTC) - timedelta(minutes=3))
    await EngineMinuteWriter(database=console.database, minutes=minutes).step()
    async with console.database.as_operator() as session:
        found = await engine_minutes(session, datetime.now(UTC) - timedelta(minutes=9))
    [by_minute] = [found[key] for key in found if key[1] == watched.address]
    assert [each.running for each in by_minute.values()] == [2]
