"""Usage of all tenants with its cost, engines, drift and health: with numbers, without any, and where a part does not answer."""

import csv
import io
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from tests.platform.engines.managed_engine import Managed
from tests.platform.web.browser import Console, Page, SignedIn
from tests.platform.web.engine.test_operator_routes import Fleet
from tests.tenants.invoices.billed_tenant import bill, now

from loraplex.adapters.errors import BlobStoreUnavailable
from loraplex.engine.messages import OTHER_TENANTS, EngineStats, TenantSteps
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Dependency, Health
from loraplex.platform.observability.metrics import Metrics
from loraplex.tenants.admission.counter_drift import CounterDrift
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.counters.counter_replies import PeriodUse
from loraplex.tenants.ledger.serving_cost import AcceleratorPrice

AREA = "/operator/console"


def given(console: Console, **dependencies: Any) -> None:
    """Replace dependencies of the running console."""
    for name, value in dependencies.items():
        object.__setattr__(console.dependencies, name, value)


async def test_people_of_tenants_never_reach_it(signed_in: SignedIn) -> None:
    browser = await signed_in("admin")
    for path in ("usage", "engine", "drift", "health"):
        assert (await browser.get(f"{AREA}/{path}")).status_code == 303


async def test_usage_with_price_cost_and_margin(console: Console, signed_in: SignedIn) -> None:
    browser, path = await signed_in("operator"), f"{AREA}/usage"
    empty = (await browser.page(path)).text
    assert "No requests in this time" in empty and "LORAPLEX_ACCELERATOR_PRICE_PER_HOUR" in empty
    tenant = await bill(console.database, await console.tenant("harbor"))
    await tenant.use(now(), 1_000_000, 500_000, 100_000)
    page = await browser.page(path)
    of_tenants = '[aria-label="Usage by tenant"]'
    assert page.texts(f"{of_tenants} tbody td")[-1] == page.texts(f"{of_tenants} tfoot td")[-1] == "$2.1750"
    days = page.all("#t-amount tbody tr")
    assert len(days) == now().day and len(page.all("#t-amount td[data-v='2175000']")) == 1
    assert "Margin" not in page.text and "LORAPLEX_ACCELERATOR_PRICE_PER_HOUR" in page.text
    [link] = [str(node.attributes["href"]) for node in page.all("a[download]")]
    [row] = csv.DictReader(io.StringIO((await browser.get(link)).text))
    assert (row["tenant"], row["amount"], row["tenant_id"]) == ("harbor", "2.175000100000", str(tenant.id))
    config = console.dependencies.config
    given(console, config=replace(config, accelerator_price=AcceleratorPrice(1, "USD")))
    page = await browser.page(path)
    figures = dict(zip(page.texts(".stat dt"), page.texts(".stat .value"), strict=True))
    assert figures["Charged per 1 M tokens"] == "$1.359375" and figures["Margin"].startswith("$2.1")
    euros = await bill(console.database, await console.tenant("euros"), {"EUR": Price(prompt=7)})
    await euros.use(now(), 10, currency="EUR")
    page = await browser.page(path)
    assert page.texts(f"{of_tenants} tbody th") == ["harbor"] and "never added" in page.text
    assert "no margin can be given in USD" in page.text
    assert (await browser.page(f"{path}?currency=EUR")).texts(f"{of_tenants} tbody th") == ["euros"]
    for query, field in (
        ("from=soon", "from"),
        ("from=2026-02-01&to=2026-01-01", "to"),
        ("from=2001-01-01", "to"),
    ):
        refused = await browser.get(f"{path}?{query}")
        assert refused.status_code == 422 and Page(refused).find(f"#{field}-e")
        assert (await browser.get(f"{path}.csv?{query}")).status_code == 422
    long = f"from={now() - timedelta(days=100):%Y-%m-%d}"
    assert "From 1 to 92 days" in (await browser.get(f"{path}?{long}")).text
    assert (await browser.get(f"{path}.csv?{long}")).status_code == 200


async def test_engines_with_their_last_numbers(console: Console, signed_in: SignedIn) -> None:
    browser, path = await signed_in("operator"), f"{AREA}/engine"
    single = await browser.page(path)
    assert single.texts("h2") == ["Engine 0 up"] and single.find("#engines").attributes["hx-get"] == path
    lost, new = Managed(), Managed()
    lost.connected, lost.failure = False, "it <b>keeps</b> failing"
    lost.known_at = now()
    lost.known_stats = EngineStats(
        running=3,
        waiting=2,
        waiting_for_adapter=1,
        total_blocks=10,
        referenced_blocks=4,
        cached_blocks=3,
        free_blocks=3,
        resident_adapters=["a" * 64],
        adapter_bytes=1 << 20,
        adapter_budget_bytes=1 << 22,
    )
    new.connected = False
    given(console, engine=EnginePool([lost, new]))
    page = await browser.page(path)
    assert page.texts("h2") == ["Engine 0 down", "Engine 1 starting"] and not page.all("main b b")
    assert "it <b>keeps</b> failing. These are its last numbers" in page.text
    assert "It has sent no numbers yet." in page.text
    assert "4 referenced, 3 cached, 3 free" in page.text and "1 MiB of 4 MiB" in page.text
    assert [rect.attributes["width"] for rect in page.all(".quota rect")] == ["40.0%", "30.0%", "25.0%"]
    part = await browser.get(path, **{"hx-request": "true"})
    assert part.status_code == 200 and part.text.lstrip().startswith('<div id="engines"')


async def test_tenants_by_share_of_steps(console: Console, signed_in: SignedIn) -> None:
    browser, path = await signed_in("operator"), f"{AREA}/engine"
    harbor, namespace_of = await console.tenant("harbor"), console.dependencies.namespace_of
    busy = Managed()
    busy.known_at = now()
    busy.known_stats = EngineStats(
        running=3,
        max_running=64,
        waiting=9,
        waiting_for_adapter=4,
        waiting_for_grammar=3,
        host_adapters=[(namespace_of(harbor), "b" * 64)],
        adapter_host_bytes=1 << 20,
        adapter_host_budget_bytes=1 << 21,
        tenant_steps=[
            TenantSteps(namespace_of(harbor), 500, 250, 2),
            TenantSteps(b"unregistered", 100, 50, 1),
            TenantSteps(OTHER_TENANTS, 75, 25, 4),
        ],
    )
    # As it comes from the engine's process.
    busy.known_stats = msgspec.msgpack.decode(msgspec.msgpack.encode(busy.known_stats), type=EngineStats)
    given(console, engine=EnginePool([busy]))
    page = await browser.page(path)
    assert "rows of 64" in page.text and "2 for a row, 4 for an adapter, 3 for a grammar" in page.text
    assert "1 MiB of 2 MiB" in page.text and page.texts("details .mono")[0] == "–"
    table = page.all("section > .table-wrap")[0]
    rows = [
        [cell.text(strip=True).replace("\xa0", " ") for cell in row.css("th, td")]
        for row in table.css("tbody tr")
    ]
    assert rows == [["harbor", "1", "500", "250", "2", "75.0 %"], ["other", "–", "175", "75", "5", "25.0 %"]]
    assert [link.attributes["href"] for link in table.css("a")] == [f"{AREA}/tenants/{harbor}"]
    busy.known_stats = EngineStats()
    assert "No step has computed a token in the last minute" in (await browser.page(path)).text


async def test_no_drift_is_said_in_words(console: Console, signed_in: SignedIn) -> None:
    tenant_id, log = (
        await console.tenant("harbor"),
        console.dependencies.admission_controller.reconciliation.log,
    )
    browser, path = await signed_in("operator"), f"{AREA}/drift"
    assert "Nothing was compared yet" in (await browser.page(path)).text
    log.compared(tenant_id, None)
    assert "No counter differs from the ledger. 1 comparison since" in (await browser.page(path)).text
    log.compared(tenant_id, CounterDrift(1, (PeriodUse("m:2026-11", 12, -3),)))
    page = await browser.page(path)
    assert page.texts("tbody th") == ["harbor"]
    assert page.texts("tbody td")[:3] == ["2026-11", "12", "−$0.000000003"]
    assert "The counters of one tenant differ" in page.text and page.texts("tbody .chip") == [
        "compared again"
    ]
    log.corrected(tenant_id)
    assert (await browser.page(path)).texts("tbody .chip") == ["corrected"]


async def test_a_part_that_is_away_is_named_with_its_error(
    console: Console, signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def well() -> None:
        return None

    async def refuses() -> None:
        raise ConnectionRefusedError("<i>refused</i>")

    async def away() -> None:
        raise BlobStoreUnavailable("the bucket does not answer")

    browser, path = await signed_in("operator"), f"{AREA}/health"
    assert "This process runs no probes" in (await browser.page(path)).text
    pool = EnginePool([Managed()])
    stores = {"postgresql": Dependency(well, 30.0), "valkey": Dependency(refuses)}
    health = Health(engines=pool, dependencies=stores, metrics=Metrics("m", "1", 100, pool))
    await health.check()
    given(console, health=health)
    monkeypatch.setattr(console.dependencies.uploads, "require_store", away)
    page = await browser.page(path)
    states = dict(zip(page.texts("tbody th"), page.texts("tbody td:nth-of-type(1)"), strict=True))
    assert states == {
        "livez": "up",
        "startupz": "up",
        "readyz": "up",
        "PostgreSQL": "up",
        "Valkey": "down",
        "Blob store": "down",
        "Disk": "up",
    }
    assert (
        "<i>refused</i>" in page.text and not page.all("main i") and "the bucket does not answer" in page.text
    )
    health.draining = True
    part = await browser.get(path, **{"hx-request": "true"})
    assert "Not ready: the server is shutting down." in part.text and "<main" not in part.text


async def test_an_operator_adds_and_drains_engines(console: Console, signed_in: SignedIn) -> None:
    browser, path = await signed_in("operator"), f"{AREA}/engine"
    assert not (await browser.page(path)).all(f'a[href="{path}/add"]')
    pool = EnginePool([Managed(), Managed()])
    pool.fleet = fleet = Fleet(pool)
    given(console, engine=pool)
    page = await browser.page(path)
    assert page.find(f'a[href="{path}/add"]') and page.find(f'a[href="{path}/1/drain"]')
    answer = await browser.submit(f"{path}/add", f"{path}/add", {"address": ""})
    assert answer.status_code == 303 and sorted(pool.engines) == [0, 1, 2]
    refused = await browser.submit(f"{path}/add", f"{path}/add", {"address": "ipc:///taken"})
    assert refused.status_code == 422 and "It is attached already" in Page(refused).text
    assert "Drain engine 1?" in (await browser.page(f"{path}/1/drain")).text
    answer = await browser.submit(f"{path}/1/drain", f"{path}/1/drain", {})
    assert answer.status_code == 303 and fleet.drained == [(1, None)]
    page = await browser.page(path)
    assert page.texts("h2") == ["Engine 0 up", "Engine 1 draining", "Engine 2 starting"]
    refused = await browser.submit(f"{path}/0/drain", f"{path}/0/drain", {})
    assert refused.status_code == 422 and "No other engine takes requests" in Page(refused).text
    assert (await browser.get(f"{path}/x/drain")).status_code == 404
